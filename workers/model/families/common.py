"""What the configs of all families are read with."""

from __future__ import annotations

from workers.model.architecture import Activation
from workers.model.config_fields import ConfigFields
from workers.model.errors import CheckpointError

# Sizes beyond these are a damaged or hostile file, not a model.
MAX_HIDDEN = 1 << 17
MAX_INNER = 1 << 20
MAX_LAYERS = 1024
MAX_HEADS = 1024
MAX_HEAD_DIM = 1024
MAX_VOCAB = 1 << 22

_ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "relu": Activation.RELU,
}
FULL, SLIDING = "full_attention", "sliding_attention"  # entries of layer_types


def activation(fields: ConfigFields, key: str, default: str) -> Activation:
    named = fields.text(key, default)
    if named not in _ACTIVATIONS:
        raise CheckpointError(
            f"config.json: {key} {named[:40]!r} is not supported; supported are {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[named]


def head_dim_of(hidden: int, heads: int) -> int:
    """Where the heads share the hidden size. Raises CheckpointError where they cannot."""
    if hidden % heads:
        raise CheckpointError(
            f"config.json: hidden size {hidden} is not a multiple of its {heads} attention heads"
        )
    return hidden // heads


def layer_types(fields: ConfigFields, default: list[str]) -> list[str]:
    """FULL or SLIDING for each layer, as `layer_types` says; without it, the default."""
    if not fields.has("layer_types"):
        return default
    kinds = fields.texts("layer_types", len(default))
    unknown = sorted(set(kinds) - {FULL, SLIDING})
    if unknown:
        raise CheckpointError(f"config.json: layer_types: {unknown[0][:40]!r} is not supported")
    return kinds


def windows(kinds: list[str], window: int | None) -> tuple[int | None, ...]:
    """Per layer; window: of the SLIDING ones."""
    if window is None and SLIDING in kinds:
        raise CheckpointError(
            "config.json: layer_types names sliding_attention but the sliding window is off"
        )
    return tuple(window if kind == SLIDING else None for kind in kinds)
