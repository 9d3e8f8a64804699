"""Phi-3, Phi-3.5 and Phi-4 (Microsoft 2024): a Llama whose QKV and gate_up are one tensor each."""

from __future__ import annotations

from dataclasses import replace

from workers.model.architecture import ModelSpec, RotaryKind
from workers.model.config_fields import ConfigFields
from workers.model.errors import CheckpointError
from workers.model.families.llama import LLAMA_NAMES, Traits, llama_like
from workers.model.names import QkvLayout
from workers.model.rotary_config import MAX_POSITIONS, RopeKeys

PHI3_NAMES = replace(
    LLAMA_NAMES,
    query="self_attn.qkv_proj",
    key="",
    value="",
    qkv=QkvLayout.STACKED,
    gate="mlp.gate_up_proj",
    up="mlp.gate_up_proj",
)
_ROPE = RopeKeys(
    share="partial_rotary_factor",
    default_original=4096,
    other_names={"su": RotaryKind.LONGROPE, "yarn": RotaryKind.LONGROPE},  # as early files call it
)


def phi3(fields: ConfigFields) -> ModelSpec:
    traits = Traits(
        default_positions=4096,
        default_eps=1e-5,
        window=fields.optional_integer("sliding_window", None, high=MAX_POSITIONS),
        rope=_ROPE,
    )
    spec = replace(llama_like(fields, traits), weights=PHI3_NAMES)
    for rotary in spec.rotaries:
        if rotary.kind not in (RotaryKind.DEFAULT, RotaryKind.LONGROPE):
            raise CheckpointError(
                f"config.json: rope type {rotary.kind.value!r} is not one of Phi-3's, default and longrope"
            )
    return spec
