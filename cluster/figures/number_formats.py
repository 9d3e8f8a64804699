"""Number formats of weights and KV blocks."""

from __future__ import annotations

_BYTES = {"auto": 2, "bfloat16": 2, "float32": 4}  # auto is bfloat16


def element_bytes(dtype: str) -> int:
    """Bytes of a number in the format that `model.dtype` names."""
    return _BYTES[dtype]
