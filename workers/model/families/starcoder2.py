"""StarCoder2 (Lozhkov et al. 2024): layer norm, rotary positions, plain MLP, biases, one window."""

from __future__ import annotations

from dataclasses import replace

from workers.model.architecture import ModelSpec, NormKind
from workers.model.config_fields import ConfigFields
from workers.model.families.llama import LLAMA_NAMES, Traits, llama_like
from workers.model.rotary_config import MAX_POSITIONS

STARCODER2_NAMES = replace(LLAMA_NAMES, gate="", up="mlp.c_fc", down="mlp.c_proj")


def starcoder2(fields: ConfigFields) -> ModelSpec:
    bias = fields.flag("use_bias", True)
    traits = Traits(
        default_positions=4096,
        default_kv_heads=2,
        default_tie=True,
        default_activation="gelu_pytorch_tanh",
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        window=fields.optional_integer("sliding_window", None, high=MAX_POSITIONS),
    )
    return replace(
        llama_like(fields, traits),
        weights=STARCODER2_NAMES,
        norm=NormKind.LAYER,
        norm_bias=True,
        norm_eps=fields.number("norm_epsilon", 1e-5, low=0.0, high=1.0),
        gated_mlp=False,
    )
