"""The one list of families, as tiny models: what says "every family" runs over it.

A new family is one entry here. Its seed comes from `python -m tests.models.screen NAME`; with it the entry is
compared with transformers, alone and on two ranks (`test_decoder`, `test_tensor_parallel`). Sizes are chosen
so that a fault shows: shapes that do not divide by two, windows and original lengths that the graded prompts
(`tests.models.checkpoints`) go past, multipliers and caps that change every value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from transformers import (
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    Starcoder2Config,
)


@dataclass(frozen=True)
class Family:
    """A kind of decoder: how its config is made. `config` takes overrides of config fields."""

    name: str
    config: Callable[..., PreTrainedConfig]
    overrides: Mapping[str, object]
    seed: int = 0  # without near ties; see `tests.models.checkpoints`


_NO_ENDS: dict[str, object] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_TINY: dict[str, object] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    **_NO_ENDS,
}
_TINY_NO_HEAD_DIM = {key: value for key, value in _TINY.items() if key != "head_dim"}
_TINY_ALL_KV = {key: value for key, value in _TINY_NO_HEAD_DIM.items() if key != "num_key_value_heads"}
_TINY_FALCON = {key: value for key, value in _TINY_ALL_KV.items() if key != "intermediate_size"}
_TINY_GPT2: dict[str, object] = {
    "vocab_size": 128,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    **_NO_ENDS,
}
_ORIGINAL = 39  # the longest graded prompt is one longer, the others and their new tokens stay below


def _rope(kind: str, **values: object) -> dict[str, object]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **values}}


_LLAMA3 = _rope(
    "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)
_LONGROPE = {
    **_rope(
        "longrope",
        short_factor=[1.0, 1.1, 1.2, 1.5, 2.0, 2.5],
        long_factor=[1.0, 1.5, 2.5, 4.0, 6.0, 6.5],
        partial_rotary_factor=0.75,
    ),
    "original_max_position_embeddings": _ORIGINAL,
}

_CORE = (
    Family("llama", LlamaConfig, _TINY, seed=2),
    Family("llama_tied", LlamaConfig, {**_TINY, "tie_word_embeddings": True}, seed=9),
    Family("llama_biased", LlamaConfig, {**_TINY, "attention_bias": True, "mlp_bias": True}, seed=2),
    Family("llama_head_dim_24", LlamaConfig, {**_TINY, "head_dim": 24}, seed=7),
    Family("llama_head_dim_8_mqa", LlamaConfig, {**_TINY, "head_dim": 8, "num_key_value_heads": 1}, seed=3),
    Family("llama_linear", LlamaConfig, {**_TINY, **_rope("linear", factor=4.0)}, seed=18),
    Family("llama_llama3", LlamaConfig, {**_TINY, **_LLAMA3}, seed=2),
    Family(
        "llama_yarn",
        LlamaConfig,
        {**_TINY, **_rope("yarn", factor=4.0, original_max_position_embeddings=64)},
        seed=45,
    ),
    Family("mistral", MistralConfig, {**_TINY, "sliding_window": 16}, seed=10),
    Family("qwen2", Qwen2Config, {**_TINY_NO_HEAD_DIM, "tie_word_embeddings": True}, seed=0),
    Family(
        "qwen2_sliding",
        Qwen2Config,
        {
            **_TINY_NO_HEAD_DIM,
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": 16,
            "max_window_layers": 1,
        },
        seed=61,
    ),
    Family("qwen3", Qwen3Config, {**_TINY, "head_dim": 24}, seed=5),
    Family("gpt2", GPT2Config, _TINY_GPT2, seed=1),
)

_OTHERS = (
    Family(
        "gemma2",
        Gemma2Config,
        {
            **_TINY,
            "num_hidden_layers": 3,
            "head_dim": 24,
            "sliding_window": 16,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
        seed=2,
    ),
    Family(
        "gemma2_no_caps",
        Gemma2Config,
        {
            **_TINY,
            "sliding_window": 16,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "layer_types": ["full_attention", "sliding_attention"],
        },
    ),
    Family(
        "gemma3",
        Gemma3TextConfig,
        {
            **_TINY,
            "num_hidden_layers": 3,
            "sliding_window": 16,
            "sliding_window_pattern": 3,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 10000.0},
            },
        },
        seed=1,
    ),
    Family(
        "gemma3_all_sliding",
        Gemma3TextConfig,
        {
            **_TINY,
            "num_key_value_heads": 1,
            "sliding_window": 7,
            "layer_types": ["sliding_attention"] * 2,
            "final_logit_softcapping": 5.0,
        },
    ),
    Family("mixtral", MixtralConfig, {**_TINY, "num_local_experts": 5}, seed=15),
    Family(
        "mixtral_sliding", MixtralConfig, {**_TINY, "num_local_experts": 3, "sliding_window": 16}, seed=29
    ),
    Family(
        "qwen3_moe",
        Qwen3MoeConfig,
        {
            **_TINY,
            "num_hidden_layers": 3,
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 44,
            "mlp_only_layers": [1],
        },
        seed=49,
    ),
    Family(
        "qwen3_moe_renormalized",
        Qwen3MoeConfig,
        {
            **_TINY,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "decoder_sparse_step": 2,
            "norm_topk_prob": True,
        },
        seed=103,
    ),
    Family("phi3", Phi3Config, {**_TINY_NO_HEAD_DIM, "intermediate_size": 97, "sliding_window": 16}, seed=10),
    Family("phi3_longrope", Phi3Config, {**_TINY_NO_HEAD_DIM, **_LONGROPE}, seed=18),
    Family("olmo2", Olmo2Config, _TINY_NO_HEAD_DIM, seed=13),
    Family(
        "olmo2_uneven",
        Olmo2Config,
        {**_TINY_NO_HEAD_DIM, "hidden_size": 72, "num_attention_heads": 6, "num_key_value_heads": 3},
        seed=11,
    ),
    Family("olmo2_one_kv_head", Olmo2Config, {**_TINY_NO_HEAD_DIM, "num_key_value_heads": 1}, seed=81),
    Family(
        "granite",
        GraniteConfig,
        {
            **_TINY_NO_HEAD_DIM,
            "attention_bias": True,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.6,
            "attention_multiplier": 0.3,
            "logits_scaling": 1.3,
        },
        seed=20,
    ),
    Family("starcoder2", Starcoder2Config, {**_TINY_NO_HEAD_DIM, "sliding_window": 16}, seed=3),
    Family("gpt_neox", GPTNeoXConfig, {**_TINY_ALL_KV, "hidden_size": 48, "num_attention_heads": 3}, seed=23),
    Family(
        "gpt_neox_serial",
        GPTNeoXConfig,
        {**_TINY_ALL_KV, "use_parallel_residual": False, "attention_bias": False, "rotary_pct": 1.0},
        seed=32,
    ),
    Family("falcon_multi_query", FalconConfig, _TINY_FALCON),
    Family(
        "falcon_groups",
        FalconConfig,
        {
            **_TINY_FALCON,
            "new_decoder_architecture": True,
            "hidden_size": 96,
            "num_attention_heads": 6,
            "num_kv_heads": 3,
            "ffn_hidden_size": 97,
        },
        seed=5,
    ),
    Family(
        "falcon_groups_one_norm",
        FalconConfig,
        {
            **_TINY_FALCON,
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "num_ln_in_parallel_attn": 1,
            "tie_word_embeddings": False,
        },
        seed=43,
    ),
    Family(
        "falcon_serial",
        FalconConfig,
        {**_TINY_FALCON, "multi_query": False, "parallel_attn": False, "bias": True},
        seed=13,
    ),
)

# These go through the engine's own tests too, which take many times as long.
CORE: tuple[Family, ...] = _CORE
FAMILIES: tuple[Family, ...] = _CORE + _OTHERS
