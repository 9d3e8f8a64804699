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


def activation(fields: ConfigFields, key: str, default: str) -> Activation:
    named = fields.text(key, default)
    if named not in _ACTIVATIONS:
        raise CheckpointError(
            f"config.json: {key} {named[:40]!r} is not supported; supported are {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[named]
