"""OLMo 2 (Ai2 2024): norms after attention and MLP alone, and of all queries and keys as a whole."""

from __future__ import annotations

from dataclasses import replace

from workers.model.architecture import ModelSpec, NormPlaces, QkNorm
from workers.model.config_fields import ConfigFields
from workers.model.families.llama import LLAMA_NAMES, Traits, llama_like

OLMO2_NAMES = replace(
    LLAMA_NAMES,
    attention_norm="",
    attention_post_norm="post_attention_layernorm",
    mlp_norm="",
    mlp_post_norm="post_feedforward_layernorm",
)


def olmo2(fields: ConfigFields) -> ModelSpec:
    attention_bias = fields.flag("attention_bias", False)
    traits = Traits(
        default_positions=2048,
        default_eps=1e-5,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        qk_norm=QkNorm.WIDTH,
    )
    return replace(llama_like(fields, traits), weights=OLMO2_NAMES, norm_places=NormPlaces.AFTER)
