"""How many blocks a KV pool gets, and their size. Plain numbers: planning uses it without torch."""

from __future__ import annotations

from dataclasses import dataclass

from workers.config import CacheConfig, ScheduleConfig
from workers.kv_format import row_bytes
from workers.model.architecture import ModelSpec
from workers.runtime.errors import PoolTooSmall

# Beyond what all running sequences can hold at full length, blocks serve only to remember old prefixes.
_USEFUL_FACTOR = 4
_USEFUL_BLOCKS = 4096


def bytes_per_block(spec: ModelSpec, num_kv_heads: int, block_size: int, dtype: str) -> int:
    """Size of one block with that many KV heads, of keys and values in the format `dtype`."""
    return num_kv_heads * spec.num_layers * 2 * block_size * row_bytes(spec.head_dim, dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeMemory:
    """What a rank finds to put its pool into."""

    num_bytes: int  # measured now
    num_sharers: int  # ranks that will take from it
    is_host: bool


def num_blocks_for(
    cache: CacheConfig, schedule: ScheduleConfig, *, block_bytes: int, max_model_len: int, free: FreeMemory
) -> int:
    """Blocks of this rank's pool: what the config says, else from free memory. Raises PoolTooSmall."""
    needed = -(-max_model_len // cache.block_size)
    if cache.num_blocks is not None:
        if cache.num_blocks < needed:
            raise PoolTooSmall(
                f"cache.num_blocks {cache.num_blocks} cannot hold one request of {max_model_len} tokens in "
                f"blocks of {cache.block_size}: it must be at least {needed} (or lower model.max_model_len "
                f"to {cache.num_blocks * cache.block_size})"
            )
        return cache.num_blocks
    budget = int(free.num_bytes * cache.memory_fraction)
    if free.is_host:
        budget = min(budget, cache.max_bytes)
    budget //= free.num_sharers
    num_blocks = budget // block_bytes
    if num_blocks < needed:
        raise PoolTooSmall(
            f"{free.num_bytes >> 20} MiB of memory are free and cache.memory_fraction "
            f"{cache.memory_fraction} with {free.num_sharers} ranks leaves {budget >> 20} MiB for the KV "
            f"pool; one request of {max_model_len} tokens needs {needed * block_bytes / 2**20:.1f} MiB: "
            f"lower model.max_model_len to at most {num_blocks * cache.block_size} or give the pool more"
        )
    return min(num_blocks, max(_USEFUL_BLOCKS, _USEFUL_FACTOR * schedule.max_running * needed))
