"""The rotary part of a config: `rope_parameters` of transformers 5, or `rope_theta` and `rope_scaling`."""

from __future__ import annotations

import math
from dataclasses import replace

from workers.model.architecture import RotaryKind, RotarySpec
from workers.model.config_fields import ConfigFields
from workers.model.errors import CheckpointError

MAX_POSITIONS = 1 << 28
_KINDS = {kind.value: kind for kind in RotaryKind}


def rotary_from_config(fields: ConfigFields, head_dim: int, max_positions: int) -> RotarySpec:
    """Reads kind and constants as transformers does. `max_positions`: max_position_embeddings.

    Raises CheckpointError for an unknown kind or constants out of range.
    """
    raw = fields.section("rope_scaling") or fields.section("rope_parameters")
    nested = [key for key, value in raw.items() if isinstance(value, dict)]
    if nested:
        raise CheckpointError(
            f"config.json: rope_parameters per layer type ({nested[0]}) are not supported here"
        )
    rope = ConfigFields(raw, "config.json: rope_parameters")
    named = rope.text("rope_type", rope.text("type", "default"))
    if named not in _KINDS:
        raise CheckpointError(
            f"config.json: rope type {named[:40]!r} is not supported; supported are {', '.join(_KINDS)}"
        )
    kind = _KINDS[named]
    if kind is RotaryKind.DYNAMIC and head_dim == 2:
        raise CheckpointError("config.json: dynamic rope needs a head_dim above 2; got 2")
    if head_dim % 2:
        raise CheckpointError(f"config.json: head_dim {head_dim} is odd; rotary positions need an even one")
    if rope.number("partial_rotary_factor", 1.0, low=0.0, high=1.0) != 1.0:
        raise CheckpointError(
            "config.json: partial_rotary_factor other than 1 is not supported for this family"
        )
    # Above 1: the logarithm of theta is divided by.
    theta_default = fields.number("rope_theta", 10000.0, low=1.001, high=1e12)
    theta = rope.number("rope_theta", theta_default, low=1.001, high=1e12)
    if kind is RotaryKind.DEFAULT:
        return RotarySpec(kind=kind, theta=theta, dim=head_dim, trained_positions=max_positions)
    if kind in (RotaryKind.LINEAR, RotaryKind.DYNAMIC):
        factor = rope.number("factor", low=1e-3, high=1e6)
        return RotarySpec(
            kind=kind, theta=theta, dim=head_dim, trained_positions=max_positions, factor=factor
        )
    plain = RotarySpec(
        kind=kind,
        theta=theta,
        dim=head_dim,
        trained_positions=_original_positions(fields, rope, max_positions),
    )
    return _llama3(plain, rope) if kind is RotaryKind.LLAMA3 else _yarn(plain, rope, max_positions)


def _llama3(plain: RotarySpec, rope: ConfigFields) -> RotarySpec:
    factor = rope.number("factor", low=1e-3, high=1e6)
    low = rope.number("low_freq_factor", low=1e-6, high=1e6)
    high = rope.number("high_freq_factor", low=1e-6, high=1e6)
    if high == low:
        raise CheckpointError("config.json: rope_parameters: low_freq_factor equals high_freq_factor")
    return replace(plain, factor=factor, low_freq_factor=low, high_freq_factor=high)


def _yarn(plain: RotarySpec, rope: ConfigFields, max_positions: int) -> RotarySpec:
    """Without a factor, as transformers has it: from the trained length to the one that the config states."""
    factor = max_positions / plain.trained_positions
    if rope.has("factor"):
        factor = rope.number("factor", low=1e-3, high=1e6)
    return replace(
        plain,
        factor=factor,
        attention_factor=_yarn_attention_factor(rope, factor),
        beta_fast=_beta(rope, "beta_fast", 32.0),
        beta_slow=_beta(rope, "beta_slow", 1.0),
        truncate=rope.flag("truncate", True),
    )


def longest_context(rotary: RotarySpec, max_positions: int) -> int:
    """Tokens of context that a stretched rotary embedding is meant for.

    Linear and dynamic configs state the length before stretching. Yarn configs state either; llama3 configs
    state the stretched one.
    """
    if rotary.kind in (RotaryKind.LINEAR, RotaryKind.DYNAMIC):
        return max(max_positions, int(max_positions * rotary.factor))
    if rotary.kind is RotaryKind.YARN:
        return max(max_positions, int(rotary.trained_positions * rotary.factor))
    return max_positions


def _original_positions(fields: ConfigFields, rope: ConfigFields, max_positions: int) -> int:
    key = "original_max_position_embeddings"
    if fields.has(key):
        return fields.integer(key, high=MAX_POSITIONS)
    return rope.integer(key, max_positions, high=MAX_POSITIONS)


def _beta(rope: ConfigFields, key: str, default: float) -> float:
    """Rotations at an end of the ramp; 0 counts as absent, as in transformers."""
    if rope.number(key, 0.0, low=0.0, high=1e6) == 0:
        return default
    return rope.number(key, low=1e-6, high=1e6)  # the logarithm of the trained length over it is rounded


def _yarn_attention_factor(rope: ConfigFields, factor: float) -> float:
    if rope.has("attention_factor"):
        return rope.number("attention_factor", low=0.0, high=1e6)
    mscale = rope.number("mscale", 0.0, low=0.0, high=1e6)
    mscale_all_dim = rope.number("mscale_all_dim", 0.0, low=0.0, high=1e6)
    if mscale and mscale_all_dim:
        return _warmth(factor, mscale) / _warmth(factor, mscale_all_dim)
    return _warmth(factor, 1.0)


def _warmth(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
