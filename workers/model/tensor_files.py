"""Parts of tensors, read straight out of the weight files.

A part is read into memory of its own, never mapped: a mapped file counts as memory of the process as far as
it has been touched, and one that becomes shorter ends the process. What a rank does not want of a row it
reads into a small buffer and leaves there.

The system keeps what was read, for whoever reads it next. Where memory does not suffice for that, files let
go of it as they are read: every page that is kept is another one that the system has to find.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, NamedTuple, Self

import torch

from workers.model.errors import CheckpointError
from workers.regular_file import open_regular

if TYPE_CHECKING:
    from workers.model.checkpoint import StoredTensor

DTYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_AHEAD_STEP_BYTES = 128 << 10  # the system takes no more than its read-ahead of one call, often this much
_BEHIND_BYTES = 512 << 20  # that stay cached: other ranks want other columns of the same rows soon
_BUFFER_BYTES = 8 << 20  # of whole rows that only some columns are wanted of


class _Extent(NamedTuple):
    """A part of an open file."""

    descriptor: int
    at: int
    num_bytes: int


class TensorFiles:
    """Reads tensors by name. A context manager: files stay open inside."""

    def __init__(self, tensors: Mapping[str, StoredTensor], *, stay_cached: bool = True) -> None:
        """stay_cached: False where the system has no memory to keep what was read."""
        self._tensors = tensors
        self._stay_cached = stay_cached
        self._behind: deque[_Extent] = deque()  # what was read last
        self._stack = ExitStack()
        self._open: dict[Path, int] = {}  # descriptors
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.clear()
        self._stack.close()

    def part(
        self,
        name: str,
        rows: range | None = None,
        columns: range | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """All of a tensor, some rows of it, or of a matrix some columns of some rows; in memory of its own,
        or in `out`, which is contiguous and of that shape and dtype.

        Raises CheckpointError when the file has become shorter or cannot be read.
        """
        stored = self._tensors[name]
        entry, dtype = stored.entry, DTYPES[stored.entry.dtype]
        shape = entry.shape
        row_bytes = _row_bytes(stored)
        at = entry.start
        if rows is not None:
            at, shape = at + rows.start * row_bytes, (len(rows), *shape[1:])
        if columns is not None:
            shape = (shape[0], len(columns))
        found = torch.empty(shape, dtype=dtype) if out is None else out
        assert found.shape == shape and found.dtype == dtype and found.is_contiguous(), name
        content = found.reshape(-1).view(torch.uint8)
        if columns is None or columns == range(entry.shape[1]):
            self._fill(stored, at, content)
        elif content.numel():
            wanted = slice(columns.start * dtype.itemsize, columns.stop * dtype.itemsize)
            self._fill_columns(stored, at, row_bytes, wanted, content.view(shape[0], -1))
        return found

    def fetch(self, name: str, rows: range) -> None:
        """Asks the system to bring these rows into its cache meanwhile. Raises CheckpointError as `part`."""
        stored = self._tensors[name]
        descriptor, row_bytes = self._descriptor(stored.file), _row_bytes(stored)
        at, stop = (stored.entry.start + row * row_bytes for row in (rows.start, rows.stop))
        while at < stop:
            count = min(_AHEAD_STEP_BYTES, stop - at)
            os.posix_fadvise(descriptor, at, count, os.POSIX_FADV_WILLNEED)
            at += count

    def _fill_columns(
        self, stored: StoredTensor, at: int, row_bytes: int, wanted: slice, into: torch.Tensor
    ) -> None:
        """Bytes `wanted` of each of the rows that begin at byte `at` of the file; into (rows, bytes)."""
        step = max(1, _BUFFER_BYTES // row_bytes)
        if self._buffer.shape[0] < step * row_bytes:
            self._buffer = torch.empty(step * row_bytes, dtype=torch.uint8)
        for first in range(0, into.shape[0], step):
            count = min(step, into.shape[0] - first)
            buffer = self._buffer[: count * row_bytes]
            self._fill(stored, at + first * row_bytes, buffer)
            into[first : first + count] = buffer.view(count, row_bytes)[:, wanted]

    def _fill(self, stored: StoredTensor, at: int, into: torch.Tensor) -> None:
        """into: bytes, contiguous."""
        descriptor = self._descriptor(stored.file)
        target, done = memoryview(into.numpy().data), 0
        while done < len(target):
            try:
                count = os.preadv(descriptor, [target[done:]], at + done)
            except OSError as error:
                raise CheckpointError(f"{stored.file}: cannot be read: {error.strerror}") from error
            if count == 0:
                raise CheckpointError(f"{stored.file}: tensor {stored.entry.name} has become shorter")
            done += count
        if not self._stay_cached:
            self._behind.append(_Extent(descriptor, at, done))
            self._let_go()

    def _let_go(self) -> None:
        """Of what was read, but for the last of it."""
        num_bytes = sum(extent.num_bytes for extent in self._behind)
        while num_bytes > _BEHIND_BYTES:
            extent = self._behind.popleft()
            os.posix_fadvise(*extent, os.POSIX_FADV_DONTNEED)
            num_bytes -= extent.num_bytes

    def _descriptor(self, file: Path) -> int:
        found = self._open.get(file)
        if found is None:
            try:
                found = self._stack.enter_context(open_regular(file)).fileno()
            except OSError as error:
                raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from error
            self._open[file] = found
        return found


def _row_bytes(stored: StoredTensor) -> int:
    """A tensor without axes is one row."""
    entry = stored.entry
    return (entry.stop - entry.start) // max((1, *entry.shape[:1]))
