"""Writing a safetensors file whose tensors come a piece at a time: none of them is ever whole in memory.

The header needs names, dtypes and shapes only, so it goes first; then every tensor's bytes go to their place.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from workers.model.safetensors_header import DTYPE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTensor:
    """A tensor to be written."""

    name: str
    dtype: str  # as safetensors calls it
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


class StreamWriter:
    """One file. A context manager; leaving it without an error checks that every tensor is complete."""

    def __init__(self, file: Path, plan: Sequence[PlannedTensor]) -> None:
        """Writes the header. Raises OSError, as every method."""
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        self._at: dict[str, int] = {}  # where the next byte of a tensor goes
        self._end: dict[str, int] = {}
        end = 0
        for tensor in plan:
            start, end = end, end + tensor.num_bytes
            header[tensor.name] = {
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "data_offsets": [start, end],
            }
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # the data starts at a multiple of 8
        at = 8 + len(text)
        for tensor in plan:
            self._at[tensor.name], at = at, at + tensor.num_bytes
            self._end[tensor.name] = at
        self._stream = file.open("wb")
        self._stream.write(len(text).to_bytes(8, "little") + text)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.close()
        if kind is None:
            missing = [name for name, at in self._at.items() if at != self._end[name]]
            assert not missing, f"not all written: {missing[:5]}"

    def append(self, name: str, part: torch.Tensor) -> None:
        """The next rows of a tensor."""
        self.append_bytes(name, part.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())

    def append_bytes(self, name: str, part: bytes) -> None:
        """The same as bytes."""
        at = self._at[name]
        assert at + len(part) <= self._end[name], f"{name}: {len(part)} bytes too many"
        self._stream.seek(at)
        self._stream.write(part)
        self._at[name] = at + len(part)
