"""Llama and its kin (Touvron et al. 2023): RMS norm, rotary positions, gated MLP."""

from __future__ import annotations

from dataclasses import dataclass

from workers.model.architecture import ModelSpec, NormKind, RotarySpec
from workers.model.config_fields import ConfigFields
from workers.model.errors import CheckpointError
from workers.model.families.common import (
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_HIDDEN,
    MAX_INNER,
    MAX_LAYERS,
    MAX_VOCAB,
    activation,
)
from workers.model.names import WeightNames
from workers.model.rotary_config import MAX_POSITIONS, longest_context, rotary_from_config

LLAMA_NAMES = WeightNames(
    prefix="model.",
    head="lm_head",
    embedding="embed_tokens",
    final_norm="norm",
    layer="layers.{}.",
    attention_norm="input_layernorm",
    mlp_norm="post_attention_layernorm",
    query="self_attn.q_proj",
    key="self_attn.k_proj",
    value="self_attn.v_proj",
    output="self_attn.o_proj",
    gate="mlp.gate_proj",
    up="mlp.up_proj",
    down="mlp.down_proj",
    query_norm="self_attn.q_norm",
    key_norm="self_attn.k_norm",
    buffers=("rotary_emb.inv_freq",),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Traits:
    """What tells a family of the Llama kind from the others, and what its config leaves unsaid."""

    default_positions: int
    default_kv_heads: int | None = None  # None: as many as query heads
    default_head_dim: int | None = None  # None: hidden size over heads
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    window: int | None = None  # of all layers
    has_layered_window: bool = False  # the config says which layers have one


def llama(fields: ConfigFields) -> ModelSpec:
    attention_bias = fields.flag("attention_bias", False)
    traits = _Traits(
        default_positions=2048,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias", False),
    )
    return llama_like(fields, traits)


def mistral(fields: ConfigFields) -> ModelSpec:
    # An absent key means the trained default, null means no window.
    if fields.mentions("sliding_window") and not fields.has("sliding_window"):
        window = None
    else:
        window = fields.integer("sliding_window", 4096, high=MAX_POSITIONS)
    kv_heads = None if fields.mentions("num_key_value_heads") else 8
    return llama_like(fields, _Traits(default_positions=4096 * 32, default_kv_heads=kv_heads, window=window))


def qwen2(fields: ConfigFields) -> ModelSpec:
    return llama_like(fields, _Traits(default_positions=32768, qkv_bias=True, has_layered_window=True))


def qwen3(fields: ConfigFields) -> ModelSpec:
    attention_bias = fields.flag("attention_bias", False)
    traits = _Traits(
        default_positions=32768,
        default_head_dim=128,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        qk_norm=True,
        has_layered_window=True,
    )
    return llama_like(fields, traits)


def llama_like(fields: ConfigFields, traits: _Traits) -> ModelSpec:
    """RMS norm, rotary positions, gated MLP."""
    hidden = fields.integer("hidden_size", high=MAX_HIDDEN)
    layers = fields.integer("num_hidden_layers", high=MAX_LAYERS)
    heads = fields.integer("num_attention_heads", high=MAX_HEADS)
    head_dim = fields.integer(
        "head_dim", traits.default_head_dim or max(1, hidden // heads), high=MAX_HEAD_DIM
    )
    positions = fields.integer("max_position_embeddings", traits.default_positions, high=MAX_POSITIONS)
    rotary: RotarySpec = rotary_from_config(fields, head_dim, positions)
    return ModelSpec(
        weights=LLAMA_NAMES,
        vocab_size=fields.integer("vocab_size", high=MAX_VOCAB),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=fields.integer("num_key_value_heads", traits.default_kv_heads or heads, high=MAX_HEADS),
        head_dim=head_dim,
        intermediate_size=fields.integer("intermediate_size", high=MAX_INNER),
        max_model_len=longest_context(rotary, positions),
        norm=NormKind.RMS,
        norm_eps=fields.number("rms_norm_eps", 1e-6, low=0.0, high=1.0),
        gated_mlp=True,
        activation=activation(fields, "hidden_act", "silu"),
        qkv_bias=traits.qkv_bias,
        output_bias=traits.output_bias,
        mlp_bias=traits.mlp_bias,
        qk_norm=traits.qk_norm,
        rotary=rotary,
        learned_positions=False,
        attention_scale=(head_dim**-0.5,) * layers,
        sliding_window=(
            _windows_by_layer(fields, layers) if traits.has_layered_window else (traits.window,) * layers
        ),
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
    )


def _windows_by_layer(fields: ConfigFields, layers: int) -> tuple[int | None, ...]:
    """Qwen: `use_sliding_window` switches all of it, `layer_types` or `max_window_layers` name the layers."""
    window = None
    no_window = fields.mentions("sliding_window") and not fields.has("sliding_window")
    if fields.flag("use_sliding_window", False) and not no_window:
        window = fields.integer("sliding_window", 4096, high=MAX_POSITIONS)
    if not fields.has("layer_types"):
        first = fields.integer("max_window_layers", 28, low=0, high=MAX_LAYERS)
        return tuple(window if index >= first else None for index in range(layers))
    kinds = fields.texts("layer_types", layers)
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown:
        raise CheckpointError(f"config.json: layer_types: {unknown[0][:40]!r} is not supported")
    if window is None and "sliding_attention" in kinds:
        raise CheckpointError(
            "config.json: layer_types names sliding_attention but the sliding window is off"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
