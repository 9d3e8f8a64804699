"""What the files of a model say against a config. Reads headers only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from cluster.config_tree import TandemConfig
from cluster.problems import Problem
from workers.model.checkpoint import Checkpoint
from workers.model.errors import CheckpointError, TensorParallelError
from workers.model.spec import check_tensor_parallel


def open_model(config: TandemConfig, folder: Path) -> tuple[Checkpoint | None, list[Problem]]:
    """The opened folder, and what does not fit it; None when it cannot be opened at all."""
    try:
        checkpoint = Checkpoint(folder)
    except (CheckpointError, OSError) as error:
        return None, [Problem(path="model.path", message=str(error))]
    return checkpoint, list(_misfits(config, checkpoint))


def _misfits(config: TandemConfig, checkpoint: Checkpoint) -> Iterator[Problem]:
    length = config.model.max_model_len
    if length is not None and length > checkpoint.max_model_len:
        yield Problem(
            path="model.max_model_len",
            message=f"longer than {checkpoint.folder.name} can",
            got=str(length),
            allowed=f"at most {checkpoint.max_model_len}",
        )
    for name, pool in config.pools.by_name().items():
        try:
            check_tensor_parallel(checkpoint.spec, pool.tensor_parallel)
        except TensorParallelError as error:
            yield Problem(path=f"pools.{name}.tensor_parallel", message=str(error))
