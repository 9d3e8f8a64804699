"""Ranks, here threads, with memory that all see: what torch's operators on symmetric memory do, on the host.

Where they would wait for each other for ever, or read what is being written, this fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from threading import Barrier
from typing import TypeVar

import torch

PATIENCE_S = 20.0
Found = TypeVar("Found")


class EmulatedHost:
    """The buffers of all ranks."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.buffers: dict[int, torch.Tensor] = {}
        self.calls: list[list[tuple[object, ...]]] = [[] for _ in range(size)]
        self._barrier = Barrier(size, action=self._check, timeout=PATIENCE_S)

    def wait(self) -> None:
        self._barrier.wait()

    def _check(self) -> None:
        """Kernels that differ in kind or size would wait for signals that nobody gives."""
        assert all(calls == self.calls[0] for calls in self.calls), self.calls


class EmulatedMemory:
    """Implements `workers.kernels.PeerMemory` for one of the ranks."""

    def __init__(self, host: EmulatedHost, rank: int, num_bytes: int) -> None:
        self._host = host
        self._rank = rank
        self.buffer = torch.full((num_bytes,), 0xFF, dtype=torch.uint8)  # NaN, until something is written
        self.is_released = False

    def meet(self) -> None:
        self._host.buffers[self._rank] = self.buffer
        self._host.wait()

    def one_shot(self, part: torch.Tensor, out: torch.Tensor) -> None:
        assert out.data_ptr() % 16 == 0 and out.shape == part.shape and out.dtype == part.dtype
        parts = self._begin("one shot", part)
        total = reduce(torch.add, parts)
        self._host.wait()
        out.copy_(total)

    def two_shots(self, part: torch.Tensor) -> None:
        parts = self._begin("two shots", part)
        share = -(-len(part) // self._host.size)
        own = slice(share * self._rank, share * (self._rank + 1))
        total = reduce(torch.add, [each[own] for each in parts])
        for each in parts:
            each[own] = total
        self._host.wait()

    def release(self) -> None:
        self.is_released = True

    def _begin(self, kind: str, part: torch.Tensor) -> list[torch.Tensor]:
        assert part.data_ptr() == self.buffer.data_ptr() and part.is_contiguous()
        assert part.nbytes % 16 == 0 and part.nbytes <= self.buffer.nbytes
        self._host.calls[self._rank].append((kind, part.dtype, len(part)))
        self._host.wait()
        buffers = [self._host.buffers[rank] for rank in range(self._host.size)]
        return [buffer.view(part.dtype)[: len(part)] for buffer in buffers]


def at_once(size: int, work: Callable[[int], Found]) -> Sequence[Found]:
    """What each of `size` ranks finds."""
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, range(size)))
