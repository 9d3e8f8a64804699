"""In which number formats keys and values lie in a pool, and how many bytes they take there."""

from __future__ import annotations

from typing import Final

INT8: Final = "int8"  # a code a number, and for each token and head a float16 scale: value = code * scale
NUMBER_BYTES: Final = {"float32": 4, "bfloat16": 2, INT8: 1}
SCALE_BYTES: Final = 2


def kv_dtype(cache_dtype: str, model_dtype: str) -> str:
    """The format that `cache.dtype` asks for: INT8, or for auto that of the model."""
    return model_dtype if cache_dtype == "auto" else cache_dtype


def row_bytes(head_dim: int, dtype: str) -> int:
    """Of the keys, or the values, of one token and KV head."""
    return head_dim * NUMBER_BYTES[dtype] + (SCALE_BYTES if dtype == INT8 else 0)


def check_pages(head_dim: int, block_size: int, dtype: str) -> None:
    """Raises ValueError for pages whose scales would not lie at even addresses."""
    if dtype == INT8 and head_dim * block_size % SCALE_BYTES:
        raise ValueError(
            f"cache.dtype int8 needs an even number of keys in a block: with heads of {head_dim} numbers "
            f"cache.block_size must be even, not {block_size}"
        )
