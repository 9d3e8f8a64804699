"""What the owner answers: the bytes of its pool, under the seqlock of the generations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from workers.kernels import BlockAnswer
from workers.transfer.messages import Check, Data, Generations, Read, Refused, Trailer, encode
from workers.transfer.pool_bytes import PoolBytes, checksum
from workers.transfer.transport import Reason

BARRIER: Final = memoryview(b"")  # in an answer: ask for more only when all before it has left the pool


class Source:
    """A pool that is read by others."""

    def __init__(self, pool: PoolBytes, generations: NDArray[np.int64] | None) -> None:
        """generations: (num_blocks,), counted up by the engine before a block changes; None above rank 0."""
        if generations is not None and (
            generations.shape != (pool.num_blocks,)
            or generations.dtype != np.int64
            or not generations.flags.c_contiguous
        ):
            raise ValueError(
                f"generations {generations.shape} {generations.dtype} for a pool of {pool.num_blocks} blocks"
            )
        self.pool = pool
        self._generations_address = generations.ctypes.data if generations is not None else 0
        self._generations = generations.data if generations is not None else None  # plain integers, live

    def answer(self, request: Read | Check) -> Iterator[memoryview | BlockAnswer]:
        """What to send, in order; a BlockAnswer must have passed before more is asked for.

        The bytes of a block are those of the pool at the time they are sent.
        """
        if isinstance(request, Check):
            yield memoryview(encode(self.compare(request)))
        elif refusal := self.refusal(request):
            yield memoryview(encode(refusal))
        else:
            yield from self._read(request)

    def compare(self, request: Check) -> Generations | Refused:
        """The answer."""
        refusal = self.refusal(request)
        if refusal is not None:
            return refusal
        return Generations(number=request.number, generations=self._generations_of(request.blocks))

    def _read(self, request: Read) -> Iterator[memoryview | BlockAnswer]:
        number, has_checksums = request.number, request.has_checksums
        before = encode(Data(number=number))
        place = (request.blocks, request.offset, request.num_bytes)
        stream = self.pool.stream(*place, has_checksums=has_checksums)
        if stream is not None:
            yield BlockAnswer(stream, before, number, self._generations_address, request.generations)
            return
        yield memoryview(before)
        yield BARRIER  # the reader's thread wakes meanwhile
        checksums = []
        for block in request.blocks:
            part = self.pool.view(block, request.offset, request.num_bytes)
            yield part
            if has_checksums:  # while the reader takes a large block in, which is in our cache
                checksums.append(checksum(part))
        yield BARRIER
        is_current = self.is_current(request)
        yield memoryview(encode(Trailer(number=number, is_current=is_current, checksums=tuple(checksums))))

    def refusal(self, request: Read | Check) -> Refused | None:
        """Why it cannot be answered; None when it can."""
        reason, message = Reason.REFUSED, ""
        pool = self.pool
        if max(request.blocks) >= pool.num_blocks:
            message = f"block {max(request.blocks)} of a pool of {pool.num_blocks}"
        elif isinstance(request, Check):
            if self._generations is None:
                message = "this rank keeps no generations: ask rank 0"
        elif not pool.has(request.blocks[0], request.offset, request.num_bytes):
            message = (
                f"bytes {request.offset} to {request.offset + request.num_bytes} of blocks of "
                f"{pool.block_bytes} bytes"
            )
        elif request.generations and self._generations is None:
            message = "this rank keeps no generations: compare them at rank 0"
        elif request.generations and len(request.generations) != len(request.blocks):
            message = f"{len(request.generations)} generations for {len(request.blocks)} blocks"
        elif not self.is_current(request):
            reason, message = Reason.STALE, "a block belongs to somebody else by now"
        if not message:
            return None
        return Refused(number=request.number, reason=reason.value, message=message)

    def is_current(self, request: Read) -> bool:
        """Whether the blocks still have the generations that were asked for."""
        return not request.generations or self._generations_of(request.blocks) == request.generations

    def _generations_of(self, blocks: tuple[int, ...]) -> tuple[int, ...]:
        assert self._generations is not None
        return tuple([self._generations[block] for block in blocks])
