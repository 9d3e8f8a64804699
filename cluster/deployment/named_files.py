"""What files that a config names hold: the model's folder (of weights only the headers), API keys, and a step
cost."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from cluster.config.problems import Problem
from cluster.config.tree import EMBEDDED_MODEL, PoolConfig, TandemConfig
from cluster.figures.number_formats import model_dtype
from cluster.figures.step_cost import StepCost, StepCostError
from cluster.models.embedded import canonical_path
from router.api.auth import load_api_keys
from router.text.tokenizer import TEXT_FILES, TextTokenizer
from workers.decoding.drafter import MEDUSA
from workers.kv_format import kv_dtype
from workers.model.checkpoint import Checkpoint
from workers.model.errors import CheckpointError, TensorParallelError
from workers.model.files import resolve_inside
from workers.model.medusa_folder import MedusaFolder
from workers.model.spec import check_tensor_parallel
from workers.runtime.pool_size import bytes_per_block


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
            largest = TextTokenizer.load(folder).largest_id
            if largest >= checkpoint.vocab_size:
                problems.append(
                    Problem(
                        path="model.path",
                        message=f"{folder}: tokenizer.json has tokens up to id {largest}, config.json says "
                        f"vocab_size {checkpoint.vocab_size}: they are not of one model",
                    )
                )
        except (CheckpointError, ValueError) as error:
            problems.append(Problem(path="model.path", message=str(error)))
    return checkpoint, problems


def key_problems(config: TandemConfig) -> Iterator[Problem]:
    """What routers on this machine would not take of the file with API keys."""
    try:
        load_api_keys(config.router.http.api_keys_file)
    except ValueError as error:
        yield Problem(path="router.http.api_keys_file", message=str(error))


def step_cost_problems(config: TandemConfig) -> Iterator[Problem]:
    """What autoscaling on this machine would not take of the file with its step cost."""
    file = config.scaling.step_cost
    if file is None:
        return
    if not os.path.isabs(file):
        yield Problem(
            path="scaling.step_cost",
            message="is no absolute path",
            got=repr(file),
            hint="it must be under this path here and on every machine of the cluster",
        )
        return
    try:
        StepCost.load(Path(file))
    except StepCostError as error:
        yield Problem(path="scaling.step_cost", message=str(error), got=repr(file))


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
            continue
        draft = None
        if folder := pool.speculative.model:
            try:
                if pool.speculative.method == MEDUSA:
                    MedusaFolder(folder, checkpoint)
                else:
                    draft = Checkpoint(folder, checkpoint)
            except (CheckpointError, OSError) as error:
                yield Problem(path=f"pools.{name}.speculative.model", message=str(error))
                continue
        yield from _too_small(config, name, pool, checkpoint, draft)


def _too_small(
    config: TandemConfig, name: str, pool: PoolConfig, checkpoint: Checkpoint, draft: Checkpoint | None
) -> Iterator[Problem]:
    """A KV pool that cannot hold one request of full length, as far as the config decides its size: groups
    refuse to start with it."""
    cache, model = pool.cache, config.model
    length = checkpoint.max_model_len if model.max_model_len is None else model.max_model_len
    needed = -(-length // cache.block_size)  # blocks
    longest = f"model.max_model_len {length}"
    if model.max_model_len is None:
        longest = f"the {length} tokens that {checkpoint.folder.name} can"
    message = f"the pool is too small for one request of {longest}"
    if cache.num_blocks is not None:
        # With model.max_model_len in the config, the config alone was enough to tell.
        if model.max_model_len is None and cache.num_blocks < needed:
            yield Problem(
                path=f"pools.{name}.cache.num_blocks",
                message=message,
                got=str(cache.num_blocks),
                allowed=f"at least {needed}",
                hint=f"or set model.max_model_len to {cache.num_blocks * cache.block_size}",
            )
        return
    if pool.num_gpus_per_rank():
        return  # max_bytes is of CPUs
    # Ranks of a machine share the limit; where they may be on several, each is taken to be alone.
    is_one_machine = pool.placement == "STRICT_PACK" or config.network.interface == "loopback"
    sharers = pool.tensor_parallel if is_one_machine else 1
    kv_heads = len(checkpoint.spec.kv_heads_of_rank(0, pool.tensor_parallel))  # the most that a rank has
    dtype = kv_dtype(cache.dtype, model_dtype(config.model.dtype))
    block_bytes = bytes_per_block(checkpoint.spec, kv_heads, cache.block_size, dtype)
    if draft is not None:  # on rank 0
        block_bytes += bytes_per_block(draft.spec, draft.spec.num_kv_heads, cache.block_size, dtype)
    num_blocks = cache.max_bytes // sharers // block_bytes
    if num_blocks < needed:
        yield Problem(
            path=f"pools.{name}.cache.max_bytes",
            message=message,
            got=str(cache.max_bytes),
            allowed=f"at least {needed * block_bytes * sharers}",
            hint=f"or set model.max_model_len to {num_blocks * cache.block_size}" if num_blocks else "",
        )
