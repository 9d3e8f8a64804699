"""Gemma 2 and 3 (Gemma Team, Google 2024, 2025), text only: norms around attention and MLP, windows by layer.

Norm weights are stored less one, embeddings are multiplied by the root of the hidden size. Gemma 2 caps
scores and logits softly; Gemma 3 has norms of heads, and its layers with a window another rotary base.
"""

from __future__ import annotations

from dataclasses import replace

from workers.model.architecture import ModelSpec, NormPlaces, QkNorm
from workers.model.config_fields import ConfigFields
from workers.model.errors import CheckpointError
from workers.model.families.common import FULL, SLIDING, layer_types, windows
from workers.model.families.llama import LLAMA_NAMES, Traits, llama_like
from workers.model.rotary_config import MAX_POSITIONS, RopeKeys, rotary_by_layer_type

GEMMA_NAMES = replace(
    LLAMA_NAMES,
    attention_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)
_MAX_CAP = 1e6


def gemma2(fields: ConfigFields) -> ModelSpec:
    plain = _gemma(fields, default_positions=8192, qk_norm=QkNorm.NONE)
    kinds = layer_types(fields, [FULL if i % 2 else SLIDING for i in range(plain.num_layers)])
    return replace(
        plain,
        sliding_window=windows(kinds, _window(fields)),
        attention_soft_cap=fields.optional_number("attn_logit_softcapping", 50.0, low=1e-3, high=_MAX_CAP),
        logits_soft_cap=fields.optional_number("final_logit_softcapping", 30.0, low=1e-3, high=_MAX_CAP),
    )


def gemma3_text(fields: ConfigFields) -> ModelSpec:
    if fields.has("attn_logit_softcapping"):
        raise CheckpointError("config.json: attn_logit_softcapping is not supported for gemma3_text")
    rope = {
        FULL: RopeKeys(default_theta=1e6),
        SLIDING: RopeKeys(theta="rope_local_base_freq", default_theta=1e4),
    }
    # What is read as in all families is all but the rotary part, which is by layer type here.
    others = fields.without("rope_parameters", "rope_scaling")
    plain = _gemma(others, default_positions=1 << 17, qk_norm=QkNorm.HEADS)
    pattern = fields.integer("sliding_window_pattern", 6, high=1 << 10)
    kinds = layer_types(fields, [SLIDING if (i + 1) % pattern else FULL for i in range(plain.num_layers)])
    rotaries = rotary_by_layer_type(fields, plain.head_dim, plain.max_model_len, rope)
    return replace(
        plain,
        sliding_window=windows(kinds, _window(fields)),
        rotary=tuple(rotaries[kind] for kind in kinds),
        logits_soft_cap=fields.optional_number("final_logit_softcapping", None, low=1e-3, high=_MAX_CAP),
    )


def _gemma(fields: ConfigFields, *, default_positions: int, qk_norm: QkNorm) -> ModelSpec:
    """What both have."""
    if fields.flag("use_bidirectional_attention", False):
        raise CheckpointError("config.json: use_bidirectional_attention is not supported")
    attention_bias = fields.flag("attention_bias", False)
    traits = Traits(
        default_positions=default_positions,
        default_kv_heads=4,
        default_head_dim=256,
        default_tie=True,
        activation_key="hidden_activation",
        default_activation="gelu_pytorch_tanh",
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        qk_norm=qk_norm,
    )
    plain = llama_like(fields, traits)
    scale = fields.number("query_pre_attn_scalar", 256, low=1e-6, high=1e9) ** -0.5
    return replace(
        plain,
        weights=GEMMA_NAMES,
        norm_offset=1.0,
        norm_places=NormPlaces.AROUND,
        attention_scale=(scale,) * plain.num_layers,
        embedding_multiplier=plain.hidden_size**0.5,
    )


def _window(fields: ConfigFields) -> int | None:
    return fields.optional_integer("sliding_window", 4096, high=MAX_POSITIONS)
