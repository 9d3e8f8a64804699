"""The paged KV pool of one rank: the tensor that holds its blocks (`workers.runtime.pool_size`: how many).

Layout (num_blocks, kv heads of the rank, layers, 2, block_size, head_dim): inside a block the heads are
outermost, so a range of heads over all layers is one contiguous run. [..., 0, :, :] is K, [..., 1, :, :] V.
"""

from __future__ import annotations

import math

import torch

from workers.kernels.memory import huge_bytes
from workers.model.architecture import ModelSpec
from workers.runtime.memory import available_host_bytes


def free_bytes(device: torch.device) -> int:
    """Memory of the device that a pool could take now."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what no tensor of this process has any more
        return torch.cuda.mem_get_info(device)[0]
    return available_host_bytes()


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
