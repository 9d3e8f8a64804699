"""The pool of a rank as bytes of blocks."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final

import numpy as np
import torch

from workers.kernels import BlockStream, KernelsUnavailable, Library, load_library

_PAGE_BYTES: Final = 4096  # as in kernels/cpu/block_stream.h
_PAGE_WORDS: Final = _PAGE_BYTES // 8

_log = logging.getLogger(__name__)


class PoolBytes:
    """Blocks of a pool, in host memory or on a device. Holds the tensor, copies nothing."""

    def __init__(self, pool: torch.Tensor, library: Library | None = None) -> None:
        """pool: (num_blocks, ...), contiguous. library: None: bytes pass through Python."""
        if not pool.is_contiguous():
            raise ValueError("the KV pool is not contiguous: its blocks are no runs of bytes")
        self._blocks = pool.view(torch.uint8).view(pool.shape[0], -1)  # (num_blocks, block_bytes)
        self._host = self._blocks.numpy() if pool.device.type == "cpu" else None
        self._library = library
        # Read once: torch takes microseconds for each of these.
        self._num_blocks, self._block_bytes = self._blocks.shape
        self._address = self._blocks.data_ptr()
        self._stream: torch.cuda.Stream | None = None
        if self._host is None:
            self._stream = torch.cuda.Stream(pool.device)  # type: ignore[no-untyped-call]

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def block_bytes(self) -> int:
        return self._block_bytes

    @property
    def is_host_memory(self) -> bool:
        return self._host is not None

    @property
    def address(self) -> int:
        """Of block 0, in this process or on its device."""
        return self._address

    @property
    def blocks(self) -> torch.Tensor:
        """(num_blocks, block_bytes) uint8, the pool itself."""
        return self._blocks

    def has(self, block: int, offset: int, num_bytes: int) -> bool:
        """Whether that is a place in the pool."""
        return (
            0 <= block < self.num_blocks
            and offset >= 0
            and num_bytes > 0
            and offset + num_bytes <= self.block_bytes
        )

    def view(self, block: int, offset: int, num_bytes: int) -> memoryview:
        """Bytes to send: of the pool itself in host memory, else a copy."""
        if self._host is not None:
            return self._host[block, offset : offset + num_bytes].data
        with self.beside_steps():
            return self._blocks[block, offset : offset + num_bytes].cpu().numpy().data

    def beside_steps(self) -> AbstractContextManager[object]:
        """What this thread starts on a device inside does not wait for steps, nor do they for it.

        No order is lost: a block is read when the step that filled it has ended, and one that is written
        belongs to no step until `synchronize` has returned.
        """
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def synchronize(self) -> None:
        """Returns when all copies to and from a device, started `beside_steps`, are done."""
        if self._stream is not None:
            self._stream.synchronize()

    def fill(self, block: int, offset: int, num_bytes: int, receive: Callable[[memoryview], None]) -> None:
        """`receive` fills the memory it is given; then the bytes are in the pool. What it raises goes on."""
        if self._host is not None:
            receive(self._host[block, offset : offset + num_bytes].data)
            return
        landing = torch.empty(num_bytes, dtype=torch.uint8)
        receive(landing.numpy().data)
        with self.beside_steps():
            self._blocks[block, offset : offset + num_bytes].copy_(landing)
        self.synchronize()

    def stream(
        self, blocks: Sequence[int], offset: int, num_bytes: int, *, has_checksums: bool
    ) -> BlockStream | None:
        """For these bytes of the blocks, in this order; None where they have to pass through Python.

        Raises ValueError for what is not in the pool.
        """
        if self._library is None or self._host is None:
            return None
        if not (self.has(min(blocks), offset, num_bytes) and max(blocks) < self.num_blocks):
            raise ValueError(
                f"bytes {offset} to {offset + num_bytes} of blocks {min(blocks)} to {max(blocks)}, in a pool "
                f"of {self.num_blocks} blocks of {self.block_bytes} bytes"
            )
        return BlockStream(
            self._library,
            blocks,
            first=self.address + offset,
            stride=self.block_bytes,
            num_bytes=num_bytes,
            has_checksums=has_checksums,
        )


def checksum(data: memoryview) -> int:
    """CRC-32 over the sums of the 64-bit words of every 4 KiB, then over the rest.

    As fast as memory is read, several times a plain CRC: it sees every changed word and every page that is
    missing, doubled or elsewhere, but not words exchanged within one page.
    """
    whole = data.nbytes - data.nbytes % _PAGE_BYTES
    words = np.frombuffer(data[:whole], dtype=np.uint64).reshape(-1, _PAGE_WORDS)
    return zlib.crc32(data[whole:], zlib.crc32(words.sum(axis=1, dtype=np.uint64).tobytes()))


def find_library(load: Callable[[], Library] = load_library) -> Library | None:
    """None, with one line in the log, where bytes have to pass through Python. `load` may compile."""
    try:
        return load()
    except KernelsUnavailable as error:
        _log.warning("KV blocks pass through Python on their way to and from sockets (slower): %s", error)
        return None
