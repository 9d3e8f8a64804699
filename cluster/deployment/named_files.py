"""What files that a config names hold: the model's folder (of weights only the headers), and API keys."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from cluster.config.problems import Problem
from cluster.config.tree import EMBEDDED_MODEL, TandemConfig
from cluster.models.embedded import canonical_path
from router.api.auth import load_api_keys
from router.text.tokenizer import TEXT_FILES, TextTokenizer
from workers.model.checkpoint import Checkpoint
from workers.model.errors import CheckpointError, TensorParallelError
from workers.model.files import resolve_inside
from workers.model.spec import check_tensor_parallel


def open_model(config: TandemConfig, folder: Path) -> tuple[Checkpoint | None, list[Problem]]:
    """The opened folder, and what does not fit it; None when it cannot be opened at all."""
    try:
        checkpoint = Checkpoint(folder)
    except (CheckpointError, OSError) as error:
        return None, [Problem(path="model.path", message=str(error))]
    problems = list(_misfits(config, checkpoint))
    if canonical_path(config.model.path) != EMBEDDED_MODEL:  # that one is known by its hashes
        try:
            for name in TEXT_FILES:
                resolve_inside(folder, name)
            TextTokenizer.load(folder)
        except (CheckpointError, ValueError) as error:
            problems.append(Problem(path="model.path", message=str(error)))
    return checkpoint, problems


def key_problems(config: TandemConfig) -> Iterator[Problem]:
    """What routers on this machine would not take of the file with API keys."""
    try:
        load_api_keys(config.router.http.api_keys_file)
    except ValueError as error:
        yield Problem(path="router.http.api_keys_file", message=str(error))


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
        num_blocks, size = pool.cache.num_blocks, pool.cache.block_size
        # With model.max_model_len in the config, the config alone was enough to tell.
        if length is None and num_blocks is not None and num_blocks * size < checkpoint.max_model_len:
            yield Problem(
                path=f"pools.{name}.cache.num_blocks",
                message="the pool is too small for one request of the "
                f"{checkpoint.max_model_len} tokens that {checkpoint.folder.name} can",
                got=str(num_blocks),
                allowed=f"at least {-(-checkpoint.max_model_len // size)}",
                hint=f"or set model.max_model_len to {num_blocks * size}",
            )
