"""From a transformers config to a ModelSpec, and whether a model can be split over a number of ranks."""

from __future__ import annotations

from collections.abc import Mapping

from workers.model.architecture import ModelSpec
from workers.model.config_fields import ConfigFields
from workers.model.errors import CheckpointError, TensorParallelError
from workers.model.families import FAMILIES
from workers.model.shares import head_splits


def spec_from_config(config: Mapping[str, object]) -> ModelSpec:
    """The spec of a checkpoint's `config.json`.

    Raises CheckpointError for an unsupported model type, a missing key, or a size that is not sane.
    """
    fields = ConfigFields(config)
    model_type = fields.text("model_type")
    make = FAMILIES.get(model_type)
    if make is None:
        raise CheckpointError(
            f"config.json: model type {model_type[:40]!r} is not supported; "
            f"supported are {', '.join(FAMILIES)}; docs/families.md says how to add one"
        )
    spec = make(fields)
    if spec.num_heads % spec.num_kv_heads:
        raise CheckpointError(
            f"config.json: {spec.num_heads} attention heads are not a multiple of "
            f"{spec.num_kv_heads} KV heads"
        )
    return spec


def legal_tensor_parallel(spec: ModelSpec) -> list[int]:
    """Group sizes the model can be split into, ascending; each rank has heads, columns and rows."""
    limit = min(spec.vocab_size, spec.intermediate_size)
    return [size for size in head_splits(spec.num_heads, spec.num_kv_heads) if size <= limit]


def check_tensor_parallel(spec: ModelSpec, tensor_parallel: int) -> None:
    """Raises TensorParallelError when the model cannot be split into that many ranks."""
    legal = legal_tensor_parallel(spec)
    if tensor_parallel not in legal:
        raise TensorParallelError(
            f"tensor_parallel {tensor_parallel} does not fit {spec.num_heads} attention heads and "
            f"{spec.num_kv_heads} KV heads; sizes that work: {', '.join(map(str, legal))}"
        )
