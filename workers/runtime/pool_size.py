"""How many blocks a KV pool gets, and their size. Plain numbers: planning uses it without torch."""

from __future__ import annotations

from workers.config import CacheConfig, ScheduleConfig
from workers.model.architecture import ModelSpec
from workers.runtime.errors import PoolTooSmall

# Beyond what all running sequences can hold at full length, blocks serve only to remember old prefixes.
_USEFUL_FACTOR = 4
_USEFUL_BLOCKS = 4096


def bytes_per_block(spec: ModelSpec, num_kv_heads: int, block_size: int, element_bytes: int) -> int:
    """Size of one block with that many KV heads."""
    return num_kv_heads * spec.num_layers * 2 * block_size * spec.head_dim * element_bytes


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
