"""Blocks between a pool in host memory and a socket, by cpu/block_stream.h. Python runs meanwhile."""

from __future__ import annotations

import ctypes
import errno
import os
from array import array
from collections.abc import Sequence
from ctypes import c_long, c_void_p
from typing import Final

from workers.kernels.library import Library

PAGE_BYTES: Final = 4096


class _State(ctypes.Structure):
    """As BlockStream in cpu/block_stream.h."""

    _fields_ = [
        ("first", c_void_p),
        ("stride", c_long),
        ("blocks", c_void_p),
        ("count", c_long),
        ("num_bytes", c_long),
        ("sums", c_void_p),
        ("done", c_long),
    ]


class BlockStream:
    """One piece of each of some blocks. The pool must outlive it; its places are not checked."""

    def __init__(
        self,
        library: Library,
        blocks: Sequence[int],
        *,
        first: int,
        stride: int,
        num_bytes: int,
        has_sums: bool,
    ) -> None:
        """first: address of the piece of block 0. stride: from block to block. num_bytes: of a piece."""
        self._library = library
        self._blocks = array("q", blocks)
        self._pages = num_bytes // PAGE_BYTES
        self._sums = array("Q", bytes(8 * self._pages * len(blocks) if has_sums else 0))
        self._whole = len(blocks) * num_bytes
        self._state = _State(
            *(first, stride, self._blocks.buffer_info()[0], len(blocks), num_bytes),
            self._sums.buffer_info()[0] if has_sums else None,
        )

    @property
    def is_done(self) -> bool:
        """All bytes have passed."""
        return bool(self._state.done == self._whole)

    def send(self, socket: int, max_bytes: int) -> int:
        """Never waits; how many bytes the system took. Raises OSError, BlockingIOError when it takes none."""
        sent: int = self._library.send_blocks(ctypes.byref(self._state), socket, max_bytes)
        if sent < 0:
            raise OSError(-sent, os.strerror(-sent))
        return sent

    def receive(self, socket: int, timeout_s: float) -> None:
        """Fills all pieces, each in this time. Raises OSError, EOFError when the other end has closed."""
        failure: int = -self._library.receive_blocks(ctypes.byref(self._state), socket, timeout_s)
        if failure == errno.ENOTCONN:
            raise EOFError
        if failure:
            raise OSError(failure, os.strerror(failure))

    def page_sums(self, index: int) -> memoryview:
        """Of the whole pages of that piece, 8 bytes each. Only with sums, of pieces that have passed."""
        return memoryview(self._sums)[index * self._pages : (index + 1) * self._pages].cast("B")
