"""Every way of stretching rotary positions against transformers, short and long, in either order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.models import checkpoints
from tests.models.engine_groups import GREEDY, Client, start_group
from tests.models.loading import logits_of, paged_model
from tests.models.oracle import Oracle
from workers.config import SpeculativeConfig
from workers.model.architecture import RotaryKind, RotarySpec
from workers.model.rotary import dynamic_frequencies

LLAMA = checkpoints.family("llama")
LONGROPE_SEED = 3  # without near ties in what is asked of it here


def rope(kind: str, **values: object) -> dict[str, object]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **values}}


KINDS = {
    "default": rope("default"),
    "linear": rope("linear", factor=4.0),
    "dynamic": {**rope("dynamic", factor=4.0), "max_position_embeddings": 32},
    "yarn": rope("yarn", factor=4.0, original_max_position_embeddings=64),
    "yarn_not_truncated": rope("yarn", factor=4.0, original_max_position_embeddings=64, truncate=False),
    "yarn_mscale": rope(
        "yarn", factor=4.0, original_max_position_embeddings=64, mscale=1.2, mscale_all_dim=0.7
    ),
    "yarn_attention_factor": rope(
        "yarn", factor=4.0, original_max_position_embeddings=64, attention_factor=1.3, beta_fast=16.0
    ),
    "llama3": rope(
        "llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=64,
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_scoring_short_and_long(kind: str, tmp_path: Path) -> None:
    folder = checkpoints.build(tmp_path / "m", LLAMA, seed=3, **KINDS[kind])
    model, oracle = paged_model(folder), Oracle(folder)
    for length in (20, 60, 20, 32, 33):
        text = checkpoints.prompt_ids(length)
        torch.testing.assert_close(logits_of(model, text), oracle.logits(text), atol=1e-4, rtol=0)


def test_a_short_text_after_a_long_one_is_not_stretched(tmp_path: Path) -> None:
    folder = checkpoints.build(tmp_path / "m", LLAMA, seed=3, **KINDS["dynamic"])
    plain = checkpoints.build(tmp_path / "p", LLAMA, seed=3, max_position_embeddings=32)
    model, short, long = paged_model(folder), checkpoints.prompt_ids(32), checkpoints.prompt_ids(60)
    first = logits_of(model, short)
    long_logits = logits_of(model, long)
    assert torch.equal(logits_of(model, short), first)
    assert torch.equal(logits_of(paged_model(plain), short), first)
    assert float((logits_of(paged_model(plain), long) - long_logits).abs().max()) > 0.5
    # A short sequence in the same step as a long one keeps its own frequencies.
    sequences = [model.start(long), model.start(short)]
    model.read(sequences, None)
    assert torch.equal(torch.stack(sequences[1].logits), first)


@pytest.mark.parametrize("dim", [16, 24, 128])
def test_dynamic_frequencies_of_a_row_know_no_other_row(dim: int) -> None:
    spec = RotarySpec(kind=RotaryKind.DYNAMIC, theta=10000.0, dim=dim, trained_positions=32, factor=4.0)
    lengths, exponents = torch.arange(33, 93)[:, None], torch.arange(0, dim, 2) / dim
    together = dynamic_frequencies(spec, lengths, exponents)
    for first in range(60):
        for count in (1, 3, 7):
            rows = slice(first, first + count)
            assert torch.equal(dynamic_frequencies(spec, lengths[rows], exponents), together[rows])


def test_dynamic_blocks_of_a_short_prompt_are_not_given_to_a_longer_one(tmp_path: Path) -> None:
    folder = checkpoints.build(tmp_path / "m", LLAMA, seed=3, **KINDS["dynamic"])
    short, long = checkpoints.prompt_ids(60)[:32], checkpoints.prompt_ids(60)
    scored = replace(GREEDY, num_logprobs=0)
    with start_group(folder, 1) as group:
        (fresh,) = Client(group.facts, group.executor).generate([long], scored)
        client = Client(group.facts, group.executor)
        client.generate([short])
        (after,) = client.generate([long], scored)
    assert after.num_cached == 0
    assert (after.token_ids, after.logprobs) == (fresh.token_ids, fresh.logprobs)
    assert client.engine.take_events() == []  # and routers are told of none


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "llama3"])
def test_generation_across_the_trained_length(kind: str, tmp_path: Path) -> None:
    prompt = checkpoints.prompt_ids(20)
    for seed in range(40):
        folder = checkpoints.build(tmp_path / str(seed), LLAMA, seed=seed, **KINDS[kind])
        wanted = Oracle(folder).continuation(prompt, 24)
        if wanted.margin >= checkpoints.MARGIN:
            break
    assert wanted.margin >= checkpoints.MARGIN
    assert paged_model(folder).greedy([prompt], 24) == [wanted.token_ids]


def test_the_spelling_before_transformers_5(tmp_path: Path) -> None:
    """`rope_theta` and `rope_scaling` with `type` instead of `rope_parameters`."""
    folder = checkpoints.build(tmp_path / "m", LLAMA, seed=3, **KINDS["linear"])
    wanted = Oracle(folder).logits(checkpoints.prompt_ids(40))
    checkpoints.edit_json(
        folder / "config.json",
        rope_parameters=None,
        rope_theta=10000.0,
        rope_scaling={"type": "linear", "factor": 4.0},
    )
    ours = logits_of(paged_model(folder), checkpoints.prompt_ids(40))
    torch.testing.assert_close(ours, wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("method", ["none", "prompt_lookup"])
@pytest.mark.parametrize(("chunk", "tensor_parallel"), [(None, 1), (7, 1), (16, 2)])
def test_longrope_computes_a_sequence_again_where_its_long_factors_set_in(
    chunk: int | None, tensor_parallel: int, method: str, tmp_path: Path
) -> None:
    """As `generate` of Phi-3 does: the prompts end before, at and after the original length of 39."""
    folder = checkpoints.build(tmp_path / "m", checkpoints.family("phi3_longrope"), seed=LONGROPE_SEED)
    oracle = Oracle(folder)
    prompts = [checkpoints.prompt_ids(length, seed=length) for length in (30, 39, 50)]
    params = replace(GREEDY, max_tokens=24)
    speculative = SpeculativeConfig(method=method, max_draft_tokens=3)
    with start_group(folder, tensor_parallel, speculative=speculative) as group:
        client = Client(group.facts, group.executor, max_prefill_chunk=chunk, speculative=speculative)
        found = [answer.token_ids for answer in client.generate(prompts, params)]
        assert client.engine.stats().preemptions_total == 0
    assert found == [oracle.greedy(prompt, 24) for prompt in prompts]
