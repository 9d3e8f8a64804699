"""Memory in huge pages, for what a step reads at random or as a whole: weights, keys and values.

Every page of 4 KiB costs a walk through the page tables, in a virtual machine a long one. Where the system
grants no huge pages everything works as before, only slower.
"""

from __future__ import annotations

import contextlib
import mmap
from typing import NamedTuple

import torch

HUGE_PAGE_BYTES = 2 << 20
CHUNK_BYTES = 64 << 20
ALIGNMENT = 64  # bytes: a cache line
MAX_KEPT_ROWS = 128  # of logits; more, as scores of a prompt need, are allocated anew


def huge_bytes(num_bytes: int) -> torch.Tensor:
    """(num_bytes,) uint8, zero, starting at a huge page; memory is taken when it is first touched."""
    whole = -(-max(num_bytes, 1) // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    memory = mmap.mmap(-1, whole + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel built without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    space = torch.frombuffer(memory, dtype=torch.uint8)  # keeps `memory`
    skip = -space.data_ptr() % HUGE_PAGE_BYTES
    return space[skip : skip + num_bytes]


class HugeMemory:
    """Hands out pieces of large chunks, one behind the other. A chunk lives as long as any piece of it."""

    def __init__(self) -> None:
        self._left = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> torch.Tensor:
        """(num_bytes,) uint8, zero, aligned to a cache line."""
        step = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        if step > self._left.shape[0]:
            self._left = huge_bytes(max(step, CHUNK_BYTES))
        piece, self._left = self._left[:num_bytes], self._left[step:]
        return piece


class Rows(NamedTuple):
    """Rows of numbers and where they lie."""

    values: torch.Tensor
    address: int


class KeptRows:
    """Rows of numbers that a step leaves, mostly in the memory of the step before.

    New memory costs a page fault every 4 KiB, which for the logits of 32 rows is longer than their product.
    """

    def __init__(
        self, width: int, dtype: torch.dtype = torch.float32, space: torch.Tensor | None = None
    ) -> None:
        """space (rows, width): where they lie if it has so many; None: in memory of their own."""
        self._width = width
        self._space = torch.empty((0, width), dtype=dtype) if space is None else space
        self._num_taken = 0
        self._taken = _rows(self._space)

    def take(self, rows: int) -> Rows:
        """(rows, width), content unspecified; valid until the next call."""
        if rows == self._num_taken:  # asks torch nothing: after a step none of it is in the caches
            return self._taken
        if rows > MAX_KEPT_ROWS:
            return _rows(torch.empty((rows, self._width), dtype=self._space.dtype))
        if rows > self._space.shape[0]:
            space = huge_bytes(rows * self._width * self._space.itemsize)
            self._space = space.view(self._space.dtype).view(rows, self._width)
        self._num_taken, self._taken = rows, _rows(self._space[:rows])
        return self._taken


def _rows(values: torch.Tensor) -> Rows:
    return Rows(values, values.data_ptr())
