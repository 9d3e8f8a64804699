"""What the configs of single families mean, and what of them is refused."""

from __future__ import annotations

import math

import pytest

from workers.model.architecture import ExpertsSpec, LayerOrder, ModelSpec, NormPlaces, QkNorm, RotaryKind
from workers.model.errors import CheckpointError
from workers.model.expected import expected_tensors
from workers.model.names import QkvLayout
from workers.model.spans import spans_of_rank
from workers.model.spec import spec_from_config

TINY: dict[str, object] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
}


def spec(model_type: str, **overrides: object) -> ModelSpec:
    return spec_from_config({**TINY, "model_type": model_type, **overrides})


def test_gemma2_windows_alternate_and_null_turns_caps_off() -> None:
    found = spec("gemma2")
    assert found.sliding_window == (4096, None, 4096, None)
    assert (found.attention_soft_cap, found.logits_soft_cap) == (50.0, 30.0)
    assert (found.embedding_multiplier, found.norm_offset, found.attention_scale[0]) == (8.0, 1.0, 1 / 16)
    assert found.norm_places is NormPlaces.AROUND and found.head_dim == 256
    off = spec("gemma2", attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (off.attention_soft_cap, off.logits_soft_cap) == (None, None)


def test_gemma3_bases_by_layer_in_both_spellings() -> None:
    old = spec("gemma3_text", sliding_window_pattern=2, rope_scaling={"rope_type": "linear", "factor": 8.0})
    nested = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
    }
    new = spec("gemma3_text", sliding_window_pattern=2, rope_parameters=nested)
    assert old == new
    assert [(rotary.theta, rotary.factor) for rotary in new.rotary if rotary] == [(1e4, 1.0), (1e6, 8.0)] * 2
    assert len(new.rotaries) == 2 and new.max_model_len == 1 << 17
    assert spec("gemma3_text").sliding_window == (4096,) * 4  # the sixth would be full


@pytest.mark.parametrize("named", ["longrope", "su", "yarn"])
def test_phi3_longrope_by_all_its_names(named: str) -> None:
    rope = {"type": named, "short_factor": [1.0] * 6, "long_factor": [4.0] * 6}
    found = spec(
        "phi3",
        rope_scaling=rope,
        partial_rotary_factor=0.75,
        max_position_embeddings=131072,
        original_max_position_embeddings=4096,
    )
    (rotary,) = found.rotaries
    assert (rotary.kind, rotary.dim, rotary.trained_positions) == (RotaryKind.LONGROPE, 12, 4096)
    assert rotary.attention_factor == math.sqrt(1 + math.log(32) / math.log(4096))
    assert found.max_model_len == 131072
    assert found.is_prefix_reusable(4096) and not found.is_prefix_reusable(4097)


@pytest.mark.parametrize(
    ("overrides", "order", "kv_heads"),
    [
        ({}, LayerOrder.PARALLEL_ONE_NORM, 1),
        ({"multi_query": False}, LayerOrder.PARALLEL_ONE_NORM, 4),
        ({"multi_query": False, "parallel_attn": False}, LayerOrder.SERIAL, 4),
        ({"new_decoder_architecture": True, "num_kv_heads": 2}, LayerOrder.PARALLEL, 2),
        (
            {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1},
            LayerOrder.PARALLEL_ONE_NORM,
            4,
        ),
    ],
)
def test_kinds_of_falcon(overrides: dict[str, object], order: LayerOrder, kv_heads: int) -> None:
    found = spec("falcon", **overrides)
    assert (found.order, found.num_kv_heads, found.intermediate_size) == (order, kv_heads, 256)


def test_norms_of_olmo2_are_of_the_whole_width_and_after() -> None:
    found = spec("olmo2")
    assert (found.qk_norm, found.norm_places) == (QkNorm.WIDTH, NormPlaces.AFTER)
    tensors = expected_tensors(found)
    assert tensors["model.layers.3.self_attn.k_norm.weight"] == (32,)
    assert not any("input_layernorm" in name for name in tensors)


@pytest.mark.parametrize(
    ("model_type", "overrides", "message"),
    [
        ("falcon", {"alibi": True}, "alibi is not supported, only rotary positions are"),
        ("falcon", {"new_decoder_architecture": True, "parallel_attn": False}, "without parallel_attn"),
        ("falcon", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn 2 without new_decoder"),
        ("falcon", {"num_attention_heads": 5}, "hidden size 64 is not a multiple of its 5 attention heads"),
        ("gpt_neox", {"rotary_pct": 0.2}, "0.2 of a head_dim of 16 are 3 elements that turn"),
        ("gpt_neox", {"rotary_pct": 0.0}, "0 of a head_dim of 16 are 0 elements that turn"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention is not supported"),
        ("gemma2", {"sliding_window": None}, "names sliding_attention but the sliding window is off"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is not supported"),
        ("gemma3_text", {"rope_parameters": {"rope_theta": 1e4}}, "'rope_theta' is none of the layer types"),
        ("gemma3_text", {"layer_types": ["chunked_attention"] * 4}, "'chunked_attention' is not supported"),
        ("phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope type 'linear' is not one of"),
        ("phi3", {"rope_scaling": {"type": "su", "short_factor": [0] * 8}}, "8 numbers from 1e-06 to 1e+09"),
        ("granite", {"logits_scaling": 0}, "logits_scaling must be a number from 1e-06 to 1e+06; got 0"),
        ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok must be an integer from 1 to 8; got 9"),
        ("mixtral", {"num_hidden_layers": 1024, "num_local_experts": 65}, "66560 experts in all layers; at"),
        ("qwen3_moe", {"num_experts": 0}, "num_experts must be an integer from 1 to 1024; got 0"),
        ("qwen3_moe", {"mlp_only_layers": ["a"]}, "mlp_only_layers must be integers from 0 to 1024"),
        ("gemma3", {}, "model type 'gemma3' is not supported"),
    ],
)
def test_refusals(model_type: str, overrides: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        spec(model_type, **overrides)
    assert message in str(caught.value)


def test_which_layers_of_qwen3_moe_have_experts() -> None:
    def sparse(**overrides: object) -> tuple[int, ...]:
        experts = spec("qwen3_moe", **overrides).experts
        return () if experts is None else experts.layers

    assert sparse() == (0, 1, 2, 3)
    assert sparse(decoder_sparse_step=2) == (1, 3)
    assert sparse(decoder_sparse_step=3) == (2,)
    assert sparse(decoder_sparse_step=2, mlp_only_layers=[3]) == (1,)
    assert sparse(mlp_only_layers=[0, 1, 2, 3]) == ()
    found = spec("qwen3_moe", num_local_experts=5, num_experts_per_tok=2, mlp_only_layers=[0])
    assert found.experts_of_layer(0) is None
    assert found.num_dense_layers == 1
    assert found.experts_of_layer(1) == ExpertsSpec(
        layers=(1, 2, 3), num_experts=5, num_per_token=2, intermediate_size=768, is_renormalized=False
    )
    tensors = expected_tensors(found)
    assert tensors["model.layers.0.mlp.gate_proj.weight"] == (96, 64)
    assert tensors["model.layers.1.mlp.gate.weight"] == (5, 64)
    assert tensors["model.layers.1.mlp.experts.4.down_proj.weight"] == (64, 768)
    assert "model.layers.1.mlp.up_proj.weight" not in tensors


def test_experts_of_mixtral_have_the_inner_size_of_the_config() -> None:
    found = spec("mixtral", num_local_experts=3)
    experts = found.experts
    assert experts == ExpertsSpec(
        layers=(0, 1, 2, 3), num_experts=3, num_per_token=2, intermediate_size=96, is_renormalized=True
    )
    assert [list(experts.of_rank(rank, 4)) for rank in range(4)] == [[0], [1], [2], []]
    shapes = expected_tensors(found)
    names = [f"model.layers.3.block_sparse_moe.experts.2.w{number}.weight" for number in (1, 2, 3)]
    assert [shapes[name] for name in names] == [(96, 64), (64, 96), (96, 64)]
    assert found.norm_eps == 1e-5 and found.sliding_window == (None,) * 4
    assert [rotary.theta for rotary in found.rotaries] == [1e6]


def test_spans_of_fused_tensors() -> None:
    """Four query heads in two groups, head_dim 16: [q q k v | q q k v] in Falcon, [q q q q | k k | v v] in
    Phi-3."""
    falcon = spec("falcon", new_decoder_architecture=True, num_kv_heads=2)
    assert falcon.weights.qkv is QkvLayout.BY_KV_HEAD
    ((_, second),) = spans_of_rank(falcon, 1, 2).qkv
    assert second == (range(64, 128),)
    ((_, whole),) = spans_of_rank(falcon, 0, 1).qkv
    assert whole == (range(32), range(64, 96), range(32, 48), range(96, 112), range(48, 64), range(112, 128))
    ((_, copied),) = spans_of_rank(falcon, 2, 4).qkv  # the third query head, and a copy of the last KV head
    assert copied == (range(64, 80), range(96, 128))
    phi3 = spans_of_rank(spec("phi3"), 1, 2)
    assert phi3.qkv == (("self_attn.qkv_proj", (range(32, 64), range(80, 96), range(112, 128))),)
    assert phi3.up == (("mlp.gate_up_proj", (range(48, 96), range(144, 192))),)


def test_runs_of_heads_cover_a_tensor_once() -> None:
    for kv_heads, size in ((1, 2), (2, 2), (2, 4), (4, 3)):
        found = spec("falcon", new_decoder_architecture=True, num_kv_heads=kv_heads)
        rows = (4 + 2 * kv_heads) * 16
        seen = {
            row
            for rank in range(size)
            for _, spans in spans_of_rank(found, rank, size).qkv
            for s in spans
            for row in s
        }
        assert seen == set(range(rows))


_PYTHIA = {"vocab_size": 50304, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
_FALCON = {"vocab_size": 65024, "num_hidden_layers": 32, "num_attention_heads": 71, "hidden_size": 4544}


@pytest.mark.parametrize(
    ("model_type", "config", "parameters"),
    [
        # Gemma 2 2B, Gemma 3 1B, Phi-3 mini, OLMo 2 7B, StarCoder2 3B, Pythia 160M, Falcon 7B and 40B,
        # Mixtral 8x7B, Qwen3 30B-A3B.
        (
            "gemma2",
            {"vocab_size": 256000, "hidden_size": 2304, "num_hidden_layers": 26, "num_attention_heads": 8}
            | {"num_key_value_heads": 4, "head_dim": 256, "intermediate_size": 9216},
            2_614_341_888,
        ),
        (
            "gemma3_text",
            {"vocab_size": 262144, "hidden_size": 1152, "num_hidden_layers": 26, "num_attention_heads": 4}
            | {"num_key_value_heads": 1, "head_dim": 256, "intermediate_size": 6912},
            999_885_952,
        ),
        (
            "phi3",
            {"vocab_size": 32064, "hidden_size": 3072, "num_hidden_layers": 32, "num_attention_heads": 32}
            | {"num_key_value_heads": 32, "intermediate_size": 8192},
            3_821_079_552,
        ),
        (
            "olmo2",
            {"vocab_size": 100352, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
            | {"num_key_value_heads": 32, "intermediate_size": 11008},
            7_298_617_344,
        ),
        (
            "starcoder2",
            {"vocab_size": 49152, "hidden_size": 3072, "num_hidden_layers": 30, "num_attention_heads": 24}
            | {"num_key_value_heads": 2, "intermediate_size": 12288},
            3_030_371_328,
        ),
        ("gpt_neox", {**_PYTHIA, "intermediate_size": 3072}, 162_322_944),
        ("falcon", _FALCON, 6_921_720_704),
        (
            "falcon",
            {**_FALCON, "hidden_size": 8192, "num_hidden_layers": 60, "num_attention_heads": 128}
            | {"new_decoder_architecture": True, "num_kv_heads": 8},
            41_303_293_952,
        ),
        (
            "mixtral",
            {"vocab_size": 32000, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
            | {"num_key_value_heads": 8, "intermediate_size": 14336},
            46_702_792_704,
        ),
        (
            "qwen3_moe",
            {"vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32}
            | {"num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144},
            30_532_122_624,
        ),
    ],
)
def test_published_sizes(model_type: str, config: dict[str, object], parameters: int) -> None:
    found = spec(model_type, **config)
    total = sum(math.prod(shape) for shape in expected_tensors(found).values())
    head = found.vocab_size * found.hidden_size
    assert total - (head if found.tie_word_embeddings else 0) == parameters
