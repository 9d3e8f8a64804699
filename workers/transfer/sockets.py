"""Blocks over TCP: between hosts, and wherever nothing faster works. The owner's side is `server`.

Bytes go from the owner's pool into the kernel and from there into the reader's pool, without a copy between.
Each block has a checksum: the network's own is 16 bits, and a wrong key is a wrong answer that nobody sees.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from workers.kernels import BlockStream
from workers.transfer.layout import Piece
from workers.transfer.link import PeerLink
from workers.transfer.messages import MAX_READ_BLOCKS, Check, Data, Generations, Read, Trailer
from workers.transfer.pool_bytes import PoolBytes, checksum
from workers.transfer.transport import Reason, TransferFailed
from workers.types import BlockRead

SOCKETS: Final = "sockets"
_REQUEST_BYTES: Final = 32 << 20  # asked for at once; two requests are under way
_AHEAD: Final = 2


class _Place(NamedTuple):
    """In the own pool."""

    blocks: list[int]
    offset: int
    num_bytes: int


class _Asked(NamedTuple):
    """A request that was sent, and where the answer goes."""

    request: Read
    place: _Place
    stream: BlockStream | None


class SocketReader:
    """See `transport.Reader`."""

    name = SOCKETS

    def __init__(self, link: PeerLink, pool: PoolBytes, *, has_checksums: bool = True) -> None:
        self._link = link
        self._pool = pool
        self._has_checksums = has_checksums

    def read(self, blocks: Sequence[BlockRead], pieces: Sequence[Piece]) -> None:
        """Asks ahead, so that the owner never waits for a request."""
        asked: deque[_Asked] = deque()
        for request, own, piece in self._requests(blocks, pieces):
            if len(asked) == _AHEAD:
                self._receive(asked.popleft())
            self._link.send(request)
            place = _Place(own, piece.own_offset, piece.num_bytes)
            asked.append(_Asked(request, place, self._pool.stream(*place, has_checksums=self._has_checksums)))
        while asked:
            self._receive(asked.popleft())

    def check(self, blocks: Sequence[BlockRead]) -> None:
        check_over(self._link, blocks)

    def cancel(self) -> None:
        self._link.cancel()

    def close(self) -> None:
        self._link.close()

    def _requests(
        self, blocks: Sequence[BlockRead], pieces: Sequence[Piece]
    ) -> Iterator[tuple[Read, list[int], Piece]]:
        """What to ask for, and the own blocks that it is for."""
        is_checked = self._link.facts.has_generations
        for piece in pieces:
            num_blocks = max(1, min(MAX_READ_BLOCKS, _REQUEST_BYTES // piece.num_bytes))
            for start in range(0, len(blocks), num_blocks):
                part = blocks[start : start + num_blocks]
                request = Read(
                    number=self._link.next_number(),
                    blocks=tuple(block.source for block in part),
                    generations=tuple(block.generation for block in part) if is_checked else (),
                    offset=piece.peer_offset,
                    num_bytes=piece.num_bytes,
                    has_checksums=self._has_checksums,
                )
                yield request, [block.own for block in part], piece

    def _receive(self, asked: _Asked) -> None:
        link, number, stream = self._link, asked.request.number, asked.stream
        before = Data(number=number)
        if stream is not None:
            answer = link.receive_blocks(before, stream)
            if not stream.is_done:
                raise link.unexpected(answer)
            found = stream.checksums
        else:
            answer = link.receive()
            if answer != before:
                raise link.unexpected(answer)
            found = self._fill(asked.place)
            answer = link.receive()
        if not isinstance(answer, Trailer) or answer.number != number:
            raise link.unexpected(answer)
        if not answer.is_current:
            raise TransferFailed(Reason.STALE, f"a block of {link.endpoint} changed while it was read")
        if found != answer.checksums:
            raise TransferFailed(
                Reason.DAMAGED, f"bytes of {link.endpoint} do not have the checksum that was sent with them"
            )

    def _fill(self, place: _Place) -> tuple[int, ...]:
        """The checksums, if there are any."""
        found: list[int] = []

        def receive(target: memoryview) -> None:
            self._link.receive_into(target)
            if self._has_checksums:
                found.append(checksum(target))

        blocks, offset, num_bytes = place
        for block in blocks:
            self._pool.fill(block, offset, num_bytes, receive)
        return tuple(found)


def check_over(link: PeerLink, blocks: Sequence[BlockRead]) -> None:
    """Compares generations by asking the owner. Raises TransferFailed."""
    for start in range(0, len(blocks), MAX_READ_BLOCKS):
        part = blocks[start : start + MAX_READ_BLOCKS]
        number = link.next_number()
        link.send(Check(number=number, blocks=tuple(block.source for block in part)))
        answer = link.receive()
        if not isinstance(answer, Generations) or answer.number != number:
            raise link.unexpected(answer)
        if answer.generations != tuple(block.generation for block in part):
            raise TransferFailed(Reason.STALE, f"a block of {link.endpoint} belongs to somebody else by now")
