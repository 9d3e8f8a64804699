"""Blocks between a pool in host memory and a socket, and the frames around them, by cpu/block_answer.h.

Python runs meanwhile.
"""

from __future__ import annotations

import errno
import os
from array import array
from collections.abc import Sequence
from typing import Final

from workers.kernels.library import Library

_TRAILER_BYTES: Final = 48  # without checksums, as in cpu/block_answer.h
_CHECKSUM_BYTES: Final = 5


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
        has_checksums: bool,
    ) -> None:
        """first: address of the piece of block 0. stride: from block to block. num_bytes: of a piece."""
        self.library = library
        self.count = len(blocks)
        self.has_checksums = has_checksums
        self._blocks = array("q", blocks)
        self._checksums = array("I", bytes(4 * self.count if has_checksums else 0))
        sums = self._checksums.buffer_info()[0] if has_checksums else 0
        # As BlockStream in cpu/block_stream.h.
        self._state = array(
            "q", (first, stride, self._blocks.buffer_info()[0], self.count, num_bytes, sums, 0)
        )
        self.address = self._state.buffer_info()[0]

    @property
    def is_done(self) -> bool:
        """All bytes have passed."""
        _, _, _, count, num_bytes, _, done = self._state
        return done == count * num_bytes

    @property
    def checksums(self) -> tuple[int, ...]:
        """Of the pieces that have passed, as `pool_bytes.checksum` has them; none where they are not made."""
        return tuple(self._checksums)

    def receive(self, socket: int, timeout_s: float, before: bytes, frame: array[int]) -> None:
        """Takes the frame `before`, fills all pieces and takes the frame behind them.

        That is in `frame` then, or what came instead of `before`: then nothing is filled. Of a frame that is
        longer than `frame` its length alone is there. Each frame and each piece may take timeout_s. Raises
        OSError, EOFError when the other end has closed.
        """
        place, room = frame.buffer_info()
        got = self.library.receive_answer(self.address, socket, timeout_s, before, len(before), place, room)
        if got == -errno.ENOTCONN:
            raise EOFError
        if got < 0 and got != -errno.EMSGSIZE:
            raise OSError(-got, os.strerror(-got))


class BlockAnswer:
    """The owner's answer to a READ. The stream, the pool and its generations must outlive it."""

    def __init__(
        self, stream: BlockStream, before: bytes, number: int, generations: int, wanted: Sequence[int]
    ) -> None:
        """before: the frame of DATA. generations: address of those of the pool. wanted: of the blocks, or
        empty: not compared."""
        self._stream = stream
        self._wanted = array("q", wanted)
        room = _TRAILER_BYTES + _CHECKSUM_BYTES * (stream.count if stream.has_checksums else 0)
        self._frames = array("B", before + bytes(room))
        frames = self._frames.buffer_info()[0]
        of_pool, of_blocks = (generations, self._wanted.buffer_info()[0]) if wanted else (0, 0)
        # As BlockAnswer in cpu/block_answer.h.
        head = len(before)
        self._state = array(
            "q", (stream.address, frames, head, of_pool, of_blocks, number, frames + head, 0, 0)
        )
        self._address = self._state.buffer_info()[0]

    @property
    def is_done(self) -> bool:
        """All bytes have passed."""
        _, _, head, _, _, _, _, trailer, done = self._state
        return trailer > 0 and done == head + trailer

    def send(self, socket: int, max_bytes: int) -> int:
        """Never waits; how many bytes the system took. Raises OSError, BlockingIOError when it takes none."""
        sent: int = self._stream.library.send_answer(self._address, socket, max_bytes)
        if sent < 0:
            raise OSError(-sent, os.strerror(-sent))
        return sent
