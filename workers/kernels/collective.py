"""Sums and gathers over the ranks of one machine through shared memory: cpu/collective.h from Python."""

from __future__ import annotations

import ctypes
import mmap
import weakref

import torch

from workers.kernels.library import DTYPES, Library
from workers.kernels.order import NodeOrder, native_nodes

_TIMEOUT, _ABORTED, _OUT_OF_STEP = 1, 2, 3  # enum Failure


class CollectiveFailed(RuntimeError):
    """A collective cannot end: a rank did not come, does something else, or the group has been given up."""


class SharedCollective:
    """This rank's end. Ranks make the same calls in the same order, from one thread; any thread may `abort`.

    Results are the same bits on all ranks and in every run: parts are added in the order of the ranks.
    """

    def __init__(
        self, library: Library, memory: mmap.mmap, *, rank: int, size: int, timeout_s: float
    ) -> None:
        """memory: `memory_bytes(library, size)` bytes or more that all ranks map; zeros before the first."""
        assert len(memory) >= memory_bytes(library, size), (len(memory), memory_bytes(library, size))
        self._library = library
        self._memory = ctypes.c_char.from_buffer(memory)  # keeps it mapped
        self._rank = rank
        self._size = size
        self._timeout_s = timeout_s
        self._address: int = library.collective(ctypes.addressof(self._memory), rank, size, timeout_s)
        # Not at exit: a thread that ends with the process may still wait for its peers.
        weakref.finalize(self, library.free_collective, self._address).atexit = False

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def address(self) -> int:
        """Of the C++ object, for a step that calls it between its layers. Valid while this object lives."""
        return self._address

    def all_reduce(self, x: torch.Tensor) -> None:
        """Sum over all ranks, in place; x is contiguous, float32 or bfloat16. Raises CollectiveFailed."""
        assert x.is_contiguous() and x.device.type == "cpu", (x.stride(), x.device)
        self._library.all_reduce(DTYPES[x.dtype], self._address, x.data_ptr(), x.numel())
        self.check()

    def join(
        self, nodes: torch.Tensor, order: NodeOrder, bias: torch.Tensor | None, out_dtype: torch.dtype
    ) -> torch.Tensor:
        """The nodes of all ranks joined as `order` says: (T, out) = sum + bias, rounded once to out_dtype.

        nodes (of this rank, T, out) and bias (out,) float32. Raises CollectiveFailed.
        """
        count, rows, columns = nodes.shape
        assert nodes.is_contiguous() and nodes.dtype == torch.float32, (nodes.stride(), nodes.dtype)
        assert count == order.counts[self._rank], (nodes.shape, order)
        assert bias is None or (bias.shape == (columns,) and bias.dtype == torch.float32), bias
        out = torch.empty((rows, columns), dtype=out_dtype)
        native = native_nodes(order)
        self._library.join(
            *(DTYPES[out_dtype], self._address, nodes.data_ptr(), rows, columns, native.counts, native.joins),
            *(None if bias is None else bias.data_ptr(), out.data_ptr()),
        )
        self.check()
        return out

    def gather_columns(
        self, x: torch.Tensor, widths: tuple[int, ...], out: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """x (rows, widths[rank]) of every rank side by side on rank 0: (rows, sum of widths); None elsewhere.

        out: what rank 0 returns; None: new memory. Raises CollectiveFailed.
        """
        assert x.is_contiguous() and x.shape[1] == widths[self._rank], (x.shape, x.stride(), widths)
        rows = x.shape[0]
        if self._rank == 0 and out is None:
            out = x.new_empty((rows, sum(widths)))
        assert out is None or (out.shape == (rows, sum(widths)) and out.dtype == x.dtype), (out.shape, rows)
        row_bytes = (ctypes.c_long * self._size)(*(width * x.element_size() for width in widths))
        self._library.gather_rows(
            *(self._address, x.data_ptr(), rows, ctypes.addressof(row_bytes)),
            None if out is None else out.data_ptr(),
        )
        self.check()
        return out

    def check(self) -> None:
        """Raises CollectiveFailed once a collective has failed: its results are no sums."""
        failure: int = self._library.failure(self._address)
        if failure == 0:
            return
        kind, peer = failure & 0xFF, failure >> 8
        if kind == _TIMEOUT:
            raise CollectiveFailed(f"rank {peer} did not come to a collective within {self._timeout_s:g} s")
        if kind == _ABORTED:
            raise CollectiveFailed("the group has been given up")
        assert kind == _OUT_OF_STEP, kind
        raise CollectiveFailed(f"rank {peer} is in another collective than rank {self._rank}")

    def abort(self) -> None:
        """Ends what all ranks wait for, now and later, with CollectiveFailed."""
        self._library.abort(self._address)


def memory_bytes(library: Library, size: int) -> int:
    """Shared memory that a group of `size` ranks needs."""
    needed: int = library.collective_bytes(size)
    return needed
