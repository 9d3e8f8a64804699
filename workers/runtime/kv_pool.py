"""The paged KV pool of one rank: how many blocks, and the tensor that holds them.

Layout (num_blocks, kv heads of the rank, layers, 2, block_size, head_dim): inside a block the heads are
outermost, so a range of heads over all layers is one contiguous run. [..., 0, :, :] is K, [..., 1, :, :] V.
"""

from __future__ import annotations

import math

import torch

from workers.config import CacheConfig, ScheduleConfig
from workers.kernels.memory import huge_bytes
from workers.model.architecture import ModelSpec
from workers.runtime.errors import PoolTooSmall
from workers.runtime.memory import available_host_bytes

# Beyond what all running sequences can hold at full length, blocks serve only to remember old prefixes.
_USEFUL_FACTOR = 4
_USEFUL_BLOCKS = 4096


def bytes_per_block(spec: ModelSpec, num_kv_heads: int, block_size: int, dtype: torch.dtype) -> int:
    """Size of one block with that many KV heads."""
    return num_kv_heads * spec.num_layers * 2 * block_size * spec.head_dim * dtype.itemsize


def free_bytes(device: torch.device) -> int:
    """Memory of the device that a pool could take now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return available_host_bytes()


def num_blocks_for(
    cache: CacheConfig,
    schedule: ScheduleConfig,
    *,
    block_bytes: int,
    max_model_len: int,
    free: int,
    sharers: int,
    is_host_memory: bool,
) -> int:
    """Blocks of this rank's pool: what the config says, else from free memory.

    `free`: bytes measured now; `sharers`: ranks that will take from the same memory. Raises PoolTooSmall.
    """
    needed = -(-max_model_len // cache.block_size)
    if cache.num_blocks is not None:
        if cache.num_blocks < needed:
            raise PoolTooSmall(
                f"cache.num_blocks {cache.num_blocks} cannot hold one request of {max_model_len} tokens in "
                f"blocks of {cache.block_size}: it must be at least {needed} (or lower model.max_model_len "
                f"to {cache.num_blocks * cache.block_size})"
            )
        return cache.num_blocks
    budget = int(free * cache.memory_fraction)
    if is_host_memory:
        budget = min(budget, cache.max_bytes)
    budget //= sharers
    num_blocks = budget // block_bytes
    if num_blocks < needed:
        raise PoolTooSmall(
            f"{free >> 20} MiB of memory are free and cache.memory_fraction {cache.memory_fraction} with "
            f"{sharers} ranks leaves {budget >> 20} MiB for the KV pool; one request of {max_model_len} "
            f"tokens needs {needed * block_bytes / 2**20:.1f} MiB: lower model.max_model_len to at most "
            f"{num_blocks * cache.block_size} or give the pool more"
        )
    return min(num_blocks, max(_USEFUL_BLOCKS, _USEFUL_FACTOR * schedule.max_running * needed))


def allocate_pool(
    spec: ModelSpec,
    *,
    num_blocks: int,
    num_kv_heads: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """The pool, all zero. Every page is touched now, so that memory that is not there shows at start."""
    shape = (num_blocks, num_kv_heads, spec.num_layers, 2, block_size, spec.head_dim)
    if device.type == "cpu":
        return huge_bytes(math.prod(shape) * dtype.itemsize).view(dtype).view(shape).zero_()
    return torch.empty(shape, dtype=dtype, device=device).zero_()
