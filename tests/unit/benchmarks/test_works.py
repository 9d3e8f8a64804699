"""What the engine benchmark calls its works, how it turns seconds into figures, and the limits it states."""

from __future__ import annotations

import pytest

from benchmarks.works import WEIGHT_FORMATS, Kind, Work, limit, standard_works, sweep_works
from cluster.plan.devices import Roofs
from cluster.plan.models import find_model
from workers.model.spec import spec_from_config

SPEC = spec_from_config(
    {
        "model_type": "llama",
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "vocab_size": 100,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
    }
)
BODY = 2 * (8 * (2 + 2) * 4 + 8 * 8 + 3 * 8 * 16)  # QKV, output, gate, up, down of two layers
HEAD = 800
BF16 = WEIGHT_FORMATS["bf16"]


def test_names_others_rely_on() -> None:
    assert [work.name("smollm2", "bf16") for work in standard_works(64)] == [
        "smollm2 bf16 decode b1",
        "smollm2 bf16 decode b8",
        "smollm2 bf16 decode b32",
        "smollm2 bf16 prefill 512",
        "smollm2 bf16 prefill 2048",
        "smollm2 bf16 ttft 2048 cached 1920",
    ]
    assert sweep_works(64)[-1].name("smollm2", "int8") == "smollm2 int8 decode b128 p512"


def test_figures_and_who_is_ahead() -> None:
    decode = Work(kind=Kind.DECODE, batch=8, prompt_tokens=128, new_tokens=64)
    assert decode.figure(1.0, 3.0) == 8 * 63 / 2
    assert decode.times_better(300.0, 100.0) == 3
    assert Work(kind=Kind.PREFILL, prompt_tokens=512).figure(0.5, 0.5) == 1024
    cached = Work(kind=Kind.CACHED, prompt_tokens=2048, cached_tokens=1920)
    assert cached.figure(0.25, 0.25) == 250 and cached.unit == "ms"
    assert cached.times_better(100.0, 300.0) == 3


def test_decode_is_bound_by_reading_or_by_products() -> None:
    work = Work(kind=Kind.DECODE, batch=4, prompt_tokens=128, new_tokens=64)
    context = 160
    read = 2 * (BODY + HEAD) + 4 * context * 2 * 2 * 1 * 4 * 2
    flop = 4 * (2 * (BODY + HEAD) + context * 4 * 2 * 4 * 2)
    reading = limit(work, SPEC, BF16, Roofs(read_bytes_per_s=1e3, flop_per_s=1e12))
    assert reading == pytest.approx(4 * 1e3 / read)
    multiplying = limit(work, SPEC, BF16, Roofs(read_bytes_per_s=1e12, flop_per_s=1e3))
    assert multiplying == pytest.approx(4 * 1e3 / flop)


def test_prefill_multiplies_the_head_for_one_row() -> None:
    roofs = Roofs(read_bytes_per_s=1e12, flop_per_s=1e3)
    pairs = 512 * 513 / 2  # a token sees itself and all before it
    flop = 2 * (BODY * 512 + HEAD) + pairs * 4 * 2 * 4 * 2
    found = limit(Work(kind=Kind.PREFILL, prompt_tokens=512), SPEC, BF16, roofs)
    assert found == pytest.approx(512 * 1e3 / flop)


def test_fewer_bytes_a_weight_raise_the_limit_but_keys_and_values_stay() -> None:
    work = Work(kind=Kind.DECODE, batch=4, prompt_tokens=128, new_tokens=64)
    read = (BODY + HEAD) / 2 + 4 * 160 * 2 * 2 * 1 * 4 * 2
    found = limit(work, SPEC, WEIGHT_FORMATS["int4"], Roofs(read_bytes_per_s=1e3, flop_per_s=1e12))
    assert found == pytest.approx(4 * 1e3 / read)


def test_experts_are_counted_in_the_format_of_the_weights() -> None:
    """The experts that a token leaves are no more bytes than there are."""
    spec, roofs = find_model("mixtral-8x7b").spec, Roofs(read_bytes_per_s=1e9, flop_per_s=1e18)
    one = Work(kind=Kind.DECODE, batch=1, prompt_tokens=1, new_tokens=1)
    rates = [limit(one, spec, WEIGHT_FORMATS[name], roofs) for name in ("bf16", "int8", "int4")]
    assert rates[1] == pytest.approx(2 * rates[0], rel=1e-3)
    assert rates[2] == pytest.approx(4 * rates[0], rel=1e-3)
