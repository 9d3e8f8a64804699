"""Layouts and numbered caches for tests."""

from __future__ import annotations

import numpy as np

from workers.transfer.layout import KVLayout


def layout(
    *,
    tensor_parallel: int = 1,
    num_kv_heads: int = 3,
    num_layers: int = 2,
    block_size: int = 4,
    head_dim: int = 2,
    dtype: str = "float32",
    kv_dtype: str | None = None,
) -> KVLayout:
    return KVLayout(
        model_hash="model",
        code="code",
        dtype=dtype,
        kv_dtype=kv_dtype or dtype,
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        num_layers=num_layers,
        head_dim=head_dim,
        tensor_parallel=tensor_parallel,
    )


def numbered_block(of: KVLayout) -> np.ndarray:
    """A block over all heads, every element another number: (kv heads, layers, 2, block_size, head_dim)."""
    shape = (of.num_kv_heads, of.num_layers, 2, of.block_size, of.head_dim)
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def part_of(block: np.ndarray, of: KVLayout, rank: int) -> np.ndarray:
    """What a rank holds of a block over all heads."""
    heads = of.heads_of(rank)
    return block[heads.start : heads.stop].copy()
