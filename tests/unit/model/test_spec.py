"""Config to spec: what is refused and how it is said; how heads are shared out."""

from __future__ import annotations

import subprocess
import sys

import pytest

from workers.model.architecture import ModelSpec
from workers.model.errors import CheckpointError, TensorParallelError
from workers.model.shares import head_splits, inner_leaves, queries_per_leaf, share
from workers.model.spec import check_tensor_parallel, legal_tensor_parallel, spec_from_config

LLAMA: dict[str, object] = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
}


def llama(**overrides: object) -> ModelSpec:
    return spec_from_config({**LLAMA, **overrides})


def test_defaults_of_the_family() -> None:
    spec = llama()
    assert (spec.head_dim, spec.max_model_len, spec.norm_eps) == (64, 2048, 1e-6)
    assert not spec.tie_word_embeddings
    assert spec.sliding_window == (None,) * 30


def test_mistral_window_absent_and_null() -> None:
    assert llama(model_type="mistral").sliding_window == (4096,) * 30
    assert llama(model_type="mistral", sliding_window=None).sliding_window == (None,) * 30


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"model_type": "mamba"},
            "model type 'mamba' is not supported; supported are llama, mistral, qwen2, qwen3, mixtral, "
            "qwen3_moe, gpt2, gemma2, gemma3_text, phi3, olmo2, granite, starcoder2, gpt_neox, falcon; "
            "docs/families.md says how to",
        ),
        ({"model_type": None}, "config.json lacks model_type"),
        ({"hidden_size": None}, "config.json lacks hidden_size"),
        ({"hidden_size": -5}, "hidden_size must be an integer from 1 to 131072; got -5"),
        ({"hidden_size": 1 << 40}, "hidden_size must be an integer from 1 to 131072; got 1099511627776"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be an integer from 1 to 1024; got True"),
        ({"vocab_size": "49152"}, "vocab_size must be an integer from 1 to 4194304; got '49152'"),
        ({"num_key_value_heads": 2}, "9 attention heads are not a multiple of 2 KV heads"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a number from 0 to 1; got nan"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false; got 1"),
        ({"hidden_act": "mish"}, "hidden_act 'mish' is not supported"),
        ({"head_dim": 63}, "head_dim 63 is odd"),
        ({"head_dim": 2, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "head_dim above 2; got 2"),
        ({"rope_theta": 1}, "rope_theta must be a number from 1.001 to 1e+12; got 1"),
        (
            {"rope_scaling": {"rope_type": "proportional", "factor": 2.0}},
            "rope type 'proportional' is not supported; supported are default, linear, dynamic, llama3, "
            "yarn, longrope",
        ),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 31}},
            "short_factor must be a list of 32 numbers",
        ),
        ({"rope_scaling": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor other than 1"),
        ({"rope_scaling": {"type": "linear"}}, "rope_parameters lacks factor"),
        ({"rope_scaling": {"type": "linear", "factor": "big"}}, "number from 0.001 to 1e+06; got 'big'"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_fast": 1e-320}},
            "beta_fast must be a number from 1e-06 to 1e+06; got 1e-320",
        ),
        ({"rope_parameters": {"full_attention": {}}}, "rope_parameters per layer type (full_attention)"),
        (
            {"model_type": "qwen2", "layer_types": ["full_attention"]},
            "layer_types must be a list of 30 strings",
        ),
        (
            {"model_type": "qwen2", "layer_types": ["sliding_attention"] * 30},
            "layer_types names sliding_attention but the sliding window is off",
        ),
        (
            {"model_type": "qwen3", "layer_types": ["linear_attention"] * 30},
            "layer_types: 'linear_attention' is not supported",
        ),
    ],
)
def test_refusals(overrides: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        llama(**overrides)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        ({"rope_type": "linear", "factor": 4.0}, 8192),
        ({"rope_type": "dynamic", "factor": 2.0}, 4096),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}, 8192),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4}, 2048),
    ],
)
def test_longest_context(rope: dict[str, object], longest: int) -> None:
    assert llama(rope_scaling=rope).max_model_len == longest


def test_shares_cover_everything_once() -> None:
    assert [share(10, rank, 4) for rank in range(4)] == [range(3), range(3, 6), range(6, 8), range(8, 10)]


def test_uneven_heads_over_two_ranks() -> None:
    spec = llama()
    assert [spec.kv_heads_of_rank(rank, 2) for rank in range(2)] == [range(2), range(2, 3)]
    assert [spec.q_heads_of_rank(rank, 2) for rank in range(2)] == [range(6), range(6, 9)]


def test_copied_kv_heads() -> None:
    spec = llama(num_attention_heads=8, num_key_value_heads=2, head_dim=64)
    assert [spec.kv_heads_of_rank(rank, 4) for rank in range(4)] == [
        range(1),
        range(1),
        range(1, 2),
        range(1, 2),
    ]
    assert [spec.q_heads_of_rank(rank, 4) for rank in range(4)] == [
        range(2),
        range(2, 4),
        range(4, 6),
        range(6, 8),
    ]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "legal"),
    [
        (9, 3, [1, 2, 3, 9]),
        (4, 1, [1, 2, 4]),
        (8, 2, [1, 2, 4, 8]),
        (4, 4, [1, 2, 3, 4]),
        (12, 4, [1, 2, 3, 4, 12]),
    ],
)
def test_legal_sizes(heads: int, kv_heads: int, legal: list[int]) -> None:
    spec = llama(num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=64)
    assert legal_tensor_parallel(spec) == legal
    for size in legal:
        check_tensor_parallel(spec, size)
        covered = [head for rank in range(size) for head in spec.q_heads_of_rank(rank, size)]
        assert covered == list(range(heads))
        for rank in range(size):
            kv = spec.kv_heads_of_rank(rank, size)
            group = heads // kv_heads
            assert {head // group for head in spec.q_heads_of_rank(rank, size)} == set(kv)


@pytest.mark.parametrize("size", [0, -1, 4, 6, 64])
def test_illegal_size_names_all_numbers(size: int) -> None:
    with pytest.raises(TensorParallelError) as caught:
        check_tensor_parallel(llama(), size)
    assert str(caught.value) == (
        f"tensor_parallel {size} does not fit 9 attention heads and 3 KV heads; sizes that work: 1, 2, 3, 9"
    )


def test_spec_and_checkpoint_load_no_torch() -> None:
    code = "import sys, workers.model.spec, workers.model.checkpoint; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_columns_are_handed_out_in_parts_for_groups_of_any_size() -> None:
    """Of whole grains of 32 where there are enough; always all columns, in order."""
    assert inner_leaves(1536, 9, 3) == (256,) * 6  # groups of 1, 2 and 3 ranks; those of 9 are of their own
    assert inner_leaves(4864, 14, 2) == (2432,) * 2
    assert inner_leaves(14336, 32, 8) == (608,) * 16 + (576,) * 8
    assert inner_leaves(96, 4, 2) == (24,) * 4
    assert inner_leaves(97, 4, 1) == (26, 24, 24, 23)
    assert inner_leaves(5, 4, 1) == (2, 2, 1)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "queries"), [(9, 3, 3), (32, 8, 4), (4, 1, 1), (14, 2, 7), (8, 2, 1)]
)
def test_query_heads_that_stay_together(heads: int, kv_heads: int, queries: int) -> None:
    assert queries_per_leaf(heads, kv_heads) == queries
    for size in head_splits(heads, kv_heads):
        split = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 16}
        spec = spec_from_config({**LLAMA, **split})
        starts = [spec.q_heads_of_rank(rank, size).start for rank in range(size)]
        assert size > 8 or not any(start % queries for start in starts)
