"""The rotary part of a config: `rope_parameters` of transformers 5, or `rope_theta` and `rope_scaling`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from workers.model.architecture import RotaryKind, RotarySpec
from workers.model.config_fields import ConfigFields
from workers.model.errors import CheckpointError

MAX_POSITIONS = 1 << 28
_KINDS = {kind.value: kind for kind in RotaryKind}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeKeys:
    """How a family says what its config has outside of `rope_parameters`, and what it leaves unsaid."""

    theta: str = "rope_theta"
    default_theta: float = 10000.0
    share: str = ""  # key of the share of a head that turns; "": all of it in this family
    default_share: float = 1.0
    default_original: int | None = None  # original_max_position_embeddings; None: max_position_embeddings
    other_names: Mapping[str, RotaryKind] = field(default_factory=dict)  # of kinds; they win over the usual


def rotary_from_config(
    fields: ConfigFields, head_dim: int, max_positions: int, keys: RopeKeys | None = None
) -> RotarySpec:
    """Reads kind and constants as transformers does. `max_positions`: max_position_embeddings.

    Raises CheckpointError for an unknown kind or constants out of range.
    """
    raw = fields.section("rope_scaling") or fields.section("rope_parameters")
    nested = [key for key, value in raw.items() if isinstance(value, dict)]
    if nested:
        raise CheckpointError(
            f"config.json: rope_parameters per layer type ({nested[0]}) are not supported here"
        )
    return _rotary(raw, fields, head_dim, max_positions, keys or RopeKeys())


def rotary_by_layer_type(
    fields: ConfigFields, head_dim: int, max_positions: int, keys: Mapping[str, RopeKeys]
) -> dict[str, RotarySpec]:
    """One for each layer type of `keys`, whose part of `rope_parameters` lies under its name. The older
    `rope_scaling` is of full attention alone (Gemma 3)."""
    nested = ConfigFields(fields.section("rope_parameters"), "config.json: rope_parameters")
    if unknown := sorted(set(fields.section("rope_parameters")) - keys.keys()):
        raise CheckpointError(
            f"config.json: rope_parameters: {unknown[0][:40]!r} is none of the layer types {', '.join(keys)}"
        )
    found = {}
    for layer_type, own in keys.items():
        raw = nested.section(layer_type)
        if layer_type == "full_attention":
            raw |= fields.section("rope_scaling")
        found[layer_type] = _rotary(raw, fields, head_dim, max_positions, own)
    return found


def _rotary(
    raw: Mapping[str, object], fields: ConfigFields, head_dim: int, max_positions: int, keys: RopeKeys
) -> RotarySpec:
    """raw: the parameters; fields: the config they are in."""
    rope = ConfigFields(raw, "config.json: rope_parameters")
    named = rope.text("rope_type", rope.text("type", "default"))
    kind = keys.other_names.get(named) or _KINDS.get(named)
    if kind is None:
        raise CheckpointError(
            f"config.json: rope type {named[:40]!r} is not supported; supported are {', '.join(_KINDS)}"
        )
    dim = _turning_dim(rope, fields, head_dim, keys)
    if kind is RotaryKind.DYNAMIC and dim == 2:
        raise CheckpointError("config.json: dynamic rope needs a head_dim above 2; got 2")
    # Above 1: the logarithm of theta is divided by.
    theta_default = fields.number(keys.theta, keys.default_theta, low=1.001, high=1e12)
    theta = rope.number("rope_theta", theta_default, low=1.001, high=1e12)
    plain = RotarySpec(kind=kind, theta=theta, dim=dim, trained_positions=max_positions)
    if kind is RotaryKind.DEFAULT:
        return plain
    if kind in (RotaryKind.LINEAR, RotaryKind.DYNAMIC):
        return replace(plain, factor=rope.number("factor", low=1e-3, high=1e6))
    original = _original_positions(fields, rope, keys.default_original or max_positions)
    plain = replace(plain, trained_positions=original)
    match kind:
        case RotaryKind.LLAMA3:
            return _llama3(plain, rope)
        case RotaryKind.YARN:
            return _yarn(plain, rope, max_positions)
        case RotaryKind.LONGROPE:
            return _longrope(plain, rope, max_positions)


def _turning_dim(rope: ConfigFields, fields: ConfigFields, head_dim: int, keys: RopeKeys) -> int:
    """Elements of a head that turn."""
    share = 1.0
    if keys.share:
        share = fields.number(keys.share, keys.default_share, low=0.0, high=1.0)
    share = rope.number("partial_rotary_factor", share, low=0.0, high=1.0)
    if share != 1.0 and not keys.share:
        raise CheckpointError(
            "config.json: partial_rotary_factor other than 1 is not supported for this family"
        )
    if share == 1.0 and head_dim % 2:
        raise CheckpointError(f"config.json: head_dim {head_dim} is odd; rotary positions need an even one")
    dim = int(head_dim * share)
    if dim < 2 or dim % 2:
        raise CheckpointError(
            f"config.json: {share:g} of a head_dim of {head_dim} are {dim} elements that turn; their number "
            "must be even and at least 2"
        )
    return dim


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


def _longrope(plain: RotarySpec, rope: ConfigFields, max_positions: int) -> RotarySpec:
    """Warmer attention by the ratio of both lengths, unless a factor is given (section 3.3)."""
    original, num_pairs = plain.trained_positions, plain.dim // 2
    factor = rope.number("factor", max_positions / original, low=1e-3, high=1e9)
    warmth = 1.0
    if factor > 1:
        if original == 1:
            raise CheckpointError("config.json: longrope needs an original_max_position_embeddings above 1")
        warmth = math.sqrt(1 + math.log(factor) / math.log(original))
    return replace(
        plain,
        factor=factor,
        attention_factor=rope.number("attention_factor", warmth, low=0.0, high=1e6),
        short_factors=rope.numbers("short_factor", num_pairs, low=1e-6, high=1e9),
        long_factors=rope.numbers("long_factor", num_pairs, low=1e-6, high=1e9),
    )


def longest_context(rotary: RotarySpec, max_positions: int) -> int:
    """Tokens of context that a stretched rotary embedding is meant for.

    Linear and dynamic configs state the length before stretching. Yarn configs state either; llama3 and
    longrope configs state the stretched one.
    """
    if rotary.kind in (RotaryKind.LINEAR, RotaryKind.DYNAMIC):
        return max(max_positions, int(max_positions * rotary.factor))
    if rotary.kind is RotaryKind.YARN:
        return max(max_positions, int(rotary.trained_positions * rotary.factor))
    return max_positions


def _original_positions(fields: ConfigFields, rope: ConfigFields, default: int) -> int:
    key = "original_max_position_embeddings"
    if fields.has(key):
        return fields.integer(key, high=MAX_POSITIONS)
    return rope.integer(key, default, high=MAX_POSITIONS)


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
