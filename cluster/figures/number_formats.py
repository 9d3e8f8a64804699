"""Number formats of weights and KV blocks."""

from __future__ import annotations

_BYTES = {"bfloat16": 2, "float32": 4}


def model_dtype(dtype: str) -> str:
    """The format that `model.dtype` names."""
    return "bfloat16" if dtype == "auto" else dtype


def element_bytes(dtype: str) -> int:
    """Bytes of a number in the format that `model.dtype` names."""
    return _BYTES[model_dtype(dtype)]
