"""The well-known figures of inference, to the digits in which people quote them."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from cluster.figures.step_cost import causal_pairs
from cluster.plan.arithmetic import (
    attended_pairs,
    attended_tokens,
    kv_bytes_per_token,
    linear_flop,
    num_parameters,
    pair_flop,
    prefill_flop,
    read_bytes,
    textbook_prefill_flop,
    weight_bytes,
)
from cluster.plan.devices import DEVICES
from cluster.plan.limits import decode_rows
from cluster.plan.memory import Shape, plan_memory
from cluster.plan.models import REFERENCES, PlannedModel, find_model
from cluster.plan.roofline import Load
from cluster.plan.textbook import notes, textbook_figures
from workers.runtime.model_work import model_work
from workers.weight_forms import Quantization, WeightForms

A100 = DEVICES["a100-80g"]
MIB, GIB = 1 << 20, 1 << 30


@pytest.fixture
def llama() -> PlannedModel:
    return find_model("llama-2-7b")


@pytest.fixture
def mistral() -> PlannedModel:
    return find_model("mistral-7b")


@pytest.fixture
def smollm2() -> PlannedModel:
    return find_model("smollm2-135m")


def test_parameters(llama: PlannedModel, mistral: PlannedModel, smollm2: PlannedModel) -> None:
    assert llama.num_parameters == 6_738_415_616
    assert f"{llama.num_parameters / 1e9:.2f}" == "6.74"
    assert f"{2 * llama.num_parameters / 1e9:.1f}" == "13.5"
    assert f"{mistral.num_parameters / 1e9:.2f}" == "7.24"
    assert smollm2.num_parameters == 134_515_008
    assert round(smollm2.num_parameters / 1e6) == 135


def test_keys_and_values(llama: PlannedModel, mistral: PlannedModel, smollm2: PlannedModel) -> None:
    assert kv_bytes_per_token(llama.spec) == 524_288 == 512 << 10
    assert kv_bytes_per_token(llama.spec) * 2048 == 1_073_741_824 == GIB
    assert kv_bytes_per_token(llama.spec) * 2048 * 32 == 32 * GIB
    assert kv_bytes_per_token(mistral.spec) == 131_072 == 128 << 10
    assert kv_bytes_per_token(mistral.spec) * 2048 == 256 * MIB
    assert kv_bytes_per_token(smollm2.spec) == 23_040
    # With K = A the formula with H gives the same, and only then.
    assert kv_bytes_per_token(llama.spec) == 2 * 32 * 4096 * 2
    assert kv_bytes_per_token(mistral.spec) * 4 == 2 * 32 * 4096 * 2


def test_int8_keys_and_values_are_half_plus_scales(llama: PlannedModel) -> None:
    assert kv_bytes_per_token(llama.spec, dtype="int8") == 524_288 // 2 + 2 * 32 * 32 * 2


def test_textbook_requests(llama: PlannedModel, mistral: PlannedModel) -> None:
    assert A100.memory_bytes == 81_920 * MIB and A100.read_bytes_per_s == 2e12
    for model, request_bytes, requests in ((llama, GIB, 66), (mistral, 256 * MIB, 267)):
        found = textbook_figures(model, A100, 2048)
        assert found.weight_bytes == 14_000_000_000
        assert (found.request_bytes, found.num_requests) == (request_bytes, requests)
        assert round(found.decode_tokens_per_s) == 143


def test_the_plan_is_exact_and_subtracts_what_else_is_needed(
    llama: PlannedModel, mistral: PlannedModel
) -> None:
    for model, requests in ((llama, 66), (mistral, 261)):
        plan = plan_memory(model, A100, Shape(context=2048))
        parts = {part.name: part.num_bytes for part in plan.parts}
        assert list(parts) == [
            *("reserve", "allocator", "weights"),
            *("activations", "temporary buffers", "KV pool"),
        ]
        assert parts["weights"] == 2 * model.num_parameters
        assert plan.num_requests == requests
        assert sum(parts.values()) <= A100.memory_bytes
        # What stays free is less than the rounding of the fraction that the config gets.
        assert A100.memory_bytes - sum(parts.values()) < 1e-4 * A100.memory_bytes + plan.block_bytes


def test_the_fraction_leaves_the_allocators_share_alone(llama: PlannedModel) -> None:
    """The engine takes it of what steps leave free: what they need must not be subtracted twice."""
    plan = plan_memory(llama, A100, Shape(context=2048))
    parts = {part.name: part.num_bytes for part in plan.parts}
    steps = parts["activations"] + parts["temporary buffers"]
    free = A100.memory_bytes - parts["reserve"] - parts["weights"]
    fraction = plan.cache.memory_fraction
    assert fraction == int((1 - A100.allocator_bytes / (free - steps)) * 1e4) / 1e4
    assert plan.num_blocks == int((free - steps) * fraction) // plan.block_bytes


def test_prefill_operations(llama: PlannedModel) -> None:
    spec = llama.spec
    assert f"{linear_flop(spec, 2048) / 1e12:.1f}" == "26.5"
    assert attended_pairs(spec, 2048) == causal_pairs(2048)
    assert f"{pair_flop(spec) * attended_pairs(spec, 2048) / 1e12:.1f}" == "1.1"
    assert f"{prefill_flop(spec, 2048) / 1e12:.1f}" == "27.6"
    assert f"{textbook_prefill_flop(spec, 2048) / 1e12:.1f}" == "2.2"
    assert int(textbook_figures(llama, A100, 2048).times_too_low) == 12


def test_decode_limits(llama: PlannedModel) -> None:
    load = Load.of(llama.spec)
    weights = 2 * (llama.num_parameters - 32_000 * 4096 - 65 * 4096)  # without embedding table and norms
    assert load.weight_bytes == weights
    assert 1 / load.decode(1, 0).seconds(A100) == pytest.approx(2e12 / weights)
    batch_8 = load.decode(8, 2048)
    assert batch_8.read_bytes == weights + 8 * GIB
    assert 8 / batch_8.seconds(A100) == pytest.approx(8 * 2e12 / (weights + 8 * GIB))
    int8 = Load.of(llama.spec, forms=WeightForms.made(Quantization.INT8))
    assert 1.99 < load.weight_bytes / int8.weight_bytes < 2


def test_attention_is_not_faster_with_quantized_weights(llama: PlannedModel) -> None:
    load, int8 = Load.of(llama.spec), Load.of(llama.spec, forms=WeightForms.made(Quantization.INT8))
    attention = pair_flop(llama.spec) * attended_pairs(llama.spec, 2048)
    assert int8.prefill(2048).flop == pytest.approx((load.prefill(2048).flop + attention) / 2)
    assert int8.decode(8, 2048).flop == pytest.approx(
        (load.decode(8, 2048).flop + 8 * 2048 * pair_flop(llama.spec)) / 2
    )
    cost, fast = load.step_cost(A100), int8.step_cost(A100)
    assert (fast.token_s, fast.row_s) == (cost.token_s / 2, cost.row_s / 2)
    assert (fast.pair_s, fast.context_token_s) == (cost.pair_s, cost.context_token_s)


def test_decode_is_bound_by_bandwidth_and_prefill_by_products(llama: PlannedModel) -> None:
    load = Load.of(llama.spec)
    assert load.decode(1, 2048).is_bandwidth_bound(A100)
    assert load.decode(128, 2048).is_bandwidth_bound(A100)
    assert not load.prefill(2048).is_bandwidth_bound(A100)
    assert A100.balance == 156
    assert load.turning_batch(A100) == pytest.approx(156)  # products against weights alone
    assert load.turning_batch(A100, context=2048) == float(
        "inf"
    )  # each sequence reads more than it multiplies
    turn = load.turning_batch(A100, context=32)
    assert load.decode(int(turn), 32).is_bandwidth_bound(A100)
    assert not load.decode(int(turn) + 1, 32).is_bandwidth_bound(A100)


def test_a_window_bounds_what_is_attended_to(mistral: PlannedModel) -> None:
    spec = mistral.spec
    assert attended_tokens(spec, 4096) == 4096 == attended_tokens(spec, 10_000)
    pairs = [min(4096, place + 1) for place in range(6000)]
    assert attended_pairs(spec, 6000) == sum(pairs)
    assert attended_pairs(spec, 1000, cached=5000) == sum(pairs[5000:])


def test_a_head_that_a_checkpoint_leaves_as_it_is_counts_as_it_is(llama: PlannedModel) -> None:
    made, left = WeightForms.made(Quantization.INT4), WeightForms(Quantization.INT4)
    more = 32_000 * 4_096 * 2 - 32_000 * (4_096 + 4)
    for counted in (read_bytes, partial(weight_bytes, is_tied=False)):
        assert counted(llama.spec, forms=left) - counted(llama.spec, forms=made) == more


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("form", ["none", "int8", "int4"])
def test_ranks_share_the_matrices(name: str, form: str) -> None:
    model = find_model(name)
    forms = WeightForms.made(Quantization(form))
    whole = read_bytes(model.spec, forms=forms)
    halves = [read_bytes(model.spec, forms=forms, rank=rank, tensor_parallel=2) for rank in (0, 1)]
    # Scales stand once a row or group, so parts of a row repeat some of them.
    assert whole <= sum(halves) < whole * 1.01
    kept = weight_bytes(model.spec, is_tied=model.is_tied, tensor_parallel=2)
    assert kept < 0.7 * weight_bytes(model.spec, is_tied=model.is_tied)


def test_one_rank_keeps_every_parameter() -> None:
    for name in REFERENCES:
        model = find_model(name)
        assert weight_bytes(model.spec, is_tied=model.is_tied) == 2 * num_parameters(
            model.spec, is_tied=model.is_tied
        )


def test_experts_count_where_they_are_used() -> None:
    """Mixtral 8x7B: 46.7 B parameters, of which a token goes through 12.9 B."""
    model = find_model("mixtral-8x7b")
    assert (model.num_parameters, model.active_parameters) == (46_702_792_704, 12_879_925_248)
    experts = 32 * 8 * 3 * 4096 * 14336
    assert linear_flop(model.spec, 10) == 20 * (32 * (2 * 4096**2 + 2 * 4096 * 1024) + experts // 4)
    load = Load.of(model.spec)
    kv = kv_bytes_per_token(model.spec)
    for batch, share in ((1, 1 / 4), (2, 1 - (3 / 4) ** 2), (64, 1 - (3 / 4) ** 64)):
        read = load.decode(batch, 100).read_bytes - 100 * batch * kv
        assert read == pytest.approx(load.weight_bytes - 2 * experts * (1 - share))
    work = model_work(
        model.spec,
        torch.bfloat16,
        WeightForms(),
        kv_bytes_per_token=kv,
    )
    assert 20 * work.linear_weights == linear_flop(model.spec, 10)
    assert (work.weight_bytes, work.expert_bytes) == (load.weight_bytes, load.expert_bytes)
    assert load.expert_bytes == 2 * experts and work.expert_share == 1 / 4


def test_what_is_expected_of_few_sequences_reads_few_experts() -> None:
    """A derived cost of bandwidth alone gives the limit; a measured one is left as it is."""
    load = Load.of(find_model("mixtral-8x7b").spec)
    cost = replace(load.step_cost(A100), token_s=0.0, row_s=0.0, context_token_s=0.0)
    rows = {
        is_measured: decode_rows(
            load, A100.roofs, cost, is_measured=is_measured, context=1, most=0, max_running=8, batches=(1, 8)
        )
        for is_measured in (False, True)
    }
    for row in rows[False]:
        assert row.expected_tokens_per_s == pytest.approx(row.limit_tokens_per_s, rel=1e-4)
    assert [row.expected_tokens_per_s for row in rows[True]] == pytest.approx(
        [batch * A100.read_bytes_per_s / load.weight_bytes for batch in (1, 8)]
    )


def test_notes_quote_the_figures(llama: PlannedModel) -> None:
    requests, decode, prefill = notes(llama, A100, 2048)
    assert requests.startswith("Textbook: floor((81,920 MiB - 14 GB) / 1,024 MiB) = 66 requests.")
    assert decode.startswith("Textbook: 2 TB/s / 14 GB = 143 tokens/s at batch 1.")
    assert "2.2 TFLOP" in prefill and prefill.endswith("12 times too low.")
