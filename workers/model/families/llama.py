"""Llama and its kin (Touvron et al. 2023): RMS norm, rotary positions, gated MLP."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from workers.model.architecture import ModelSpec, NormKind, QkNorm
from workers.model.config_fields import ConfigFields
from workers.model.families.common import (
    FULL,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_HIDDEN,
    MAX_INNER,
    MAX_LAYERS,
    MAX_VOCAB,
    activation,
    layer_types,
    windows,
)
from workers.model.names import WeightNames
from workers.model.rotary_config import MAX_POSITIONS, RopeKeys, longest_context, rotary_from_config

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
class Traits:
    """What tells a family of the Llama kind from the others, and what its config leaves unsaid."""

    default_positions: int
    default_kv_heads: int | None = None  # None: as many as query heads
    default_head_dim: int | None = None  # None: hidden size over heads
    default_eps: float = 1e-6
    default_tie: bool = False
    activation_key: str = "hidden_act"
    default_activation: str = "silu"
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: QkNorm = QkNorm.NONE
    window: int | None = None  # of all layers
    rope: RopeKeys = field(default_factory=RopeKeys)


def llama(fields: ConfigFields) -> ModelSpec:
    attention_bias = fields.flag("attention_bias", False)
    traits = Traits(
        default_positions=2048,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias", False),
    )
    return llama_like(fields, traits)


def mistral(fields: ConfigFields) -> ModelSpec:
    window = fields.optional_integer("sliding_window", 4096, high=MAX_POSITIONS)
    kv_heads = None if fields.mentions("num_key_value_heads") else 8
    return llama_like(fields, Traits(default_positions=4096 * 32, default_kv_heads=kv_heads, window=window))


def qwen2(fields: ConfigFields) -> ModelSpec:
    return _qwen(fields, Traits(default_positions=32768, qkv_bias=True))


def qwen3(fields: ConfigFields) -> ModelSpec:
    attention_bias = fields.flag("attention_bias", False)
    traits = Traits(
        default_positions=32768,
        default_head_dim=128,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        qk_norm=QkNorm.HEADS,
    )
    return _qwen(fields, traits)


def granite(fields: ConfigFields) -> ModelSpec:
    """Granite 3 (IBM 2024): multipliers in four places (Yang et al., "Tensor Programs V", 2022)."""
    attention_bias = fields.flag("attention_bias", False)
    traits = Traits(
        default_positions=2048,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias", False),
    )
    plain = llama_like(fields, traits)

    def multiplier(name: str) -> float:
        return fields.number(name, 1.0, low=1e-6, high=1e6)

    return replace(
        plain,
        attention_scale=(multiplier("attention_multiplier"),) * plain.num_layers,
        embedding_multiplier=multiplier("embedding_multiplier"),
        residual_multiplier=multiplier("residual_multiplier"),
        logits_divisor=multiplier("logits_scaling"),
    )


def llama_like(fields: ConfigFields, traits: Traits) -> ModelSpec:
    """RMS norm, rotary positions, gated MLP."""
    hidden = fields.integer("hidden_size", high=MAX_HIDDEN)
    layers = fields.integer("num_hidden_layers", high=MAX_LAYERS)
    heads = fields.integer("num_attention_heads", high=MAX_HEADS)
    head_dim = fields.integer(
        "head_dim", traits.default_head_dim or max(1, hidden // heads), high=MAX_HEAD_DIM
    )
    positions = fields.integer("max_position_embeddings", traits.default_positions, high=MAX_POSITIONS)
    rotary = rotary_from_config(fields, head_dim, positions, traits.rope)
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
        norm_eps=fields.number("rms_norm_eps", traits.default_eps, low=0.0, high=1.0),
        gated_mlp=True,
        activation=activation(fields, traits.activation_key, traits.default_activation),
        qkv_bias=traits.qkv_bias,
        output_bias=traits.output_bias,
        mlp_bias=traits.mlp_bias,
        qk_norm=traits.qk_norm,
        rotary=(rotary,) * layers,
        attention_scale=(head_dim**-0.5,) * layers,
        sliding_window=(traits.window,) * layers,
        tie_word_embeddings=fields.flag("tie_word_embeddings", traits.default_tie),
    )


def _qwen(fields: ConfigFields, traits: Traits) -> ModelSpec:
    """`use_sliding_window` switches all of it, `layer_types` or `max_window_layers` name the layers."""
    plain, window = llama_like(fields, traits), None
    if fields.flag("use_sliding_window", False):
        window = fields.optional_integer("sliding_window", 4096, high=MAX_POSITIONS)
    if not fields.has("layer_types"):
        first = fields.integer("max_window_layers", 28, low=0, high=MAX_LAYERS)
        by_layer = tuple(window if index >= first else None for index in range(plain.num_layers))
        return replace(plain, sliding_window=by_layer)
    return replace(plain, sliding_window=windows(layer_types(fields, plain.num_layers * [FULL]), window))
