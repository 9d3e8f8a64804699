"""The paged KV pool of one rank: the memory that holds its blocks (`workers.runtime.pool_size`: how many)."""

from __future__ import annotations

import torch

from workers.host_memory import available_host_bytes
from workers.kernels import CacheForm, PagedCache
from workers.kernels.memory import huge_bytes


def free_bytes(device: torch.device) -> int:
    """Memory of the device that a pool could take now."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what no tensor of this process has any more
        return torch.cuda.mem_get_info(device)[0]
    return available_host_bytes()


def allocate_pool(num_blocks: int, form: CacheForm, device: torch.device) -> PagedCache:
    """The pool, all zero. Every page is touched now, so that memory that is not there shows at start."""
    shape = (num_blocks, form.block_bytes)
    if device.type == "cpu":
        return PagedCache(huge_bytes(num_blocks * form.block_bytes).view(shape).zero_(), form)
    return PagedCache(torch.empty(shape, dtype=torch.uint8, device=device).zero_(), form)
