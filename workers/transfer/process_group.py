"""Blocks by torch.distributed, point to point: NCCL between GPUs, gloo between host pools.

Each pair of a reader and an owner has a process group of its own, beside the one that its ranks compute with:
it is made on first use through a store that the reader opens, and ends with the first failure. The reader's
connection carries the requests; the bytes come through the group:

    R  PAIR      where the store is; from now on a thread of its own serves this connection
    R  READ      as over sockets, answered by REFUSED, or by DATA; then one `send` of the group; then TRAILER

The owner gathers blocks into a buffer between two looks at the generations, the reader spreads them out of
one into its pool. So the group never touches a pool, and one that hangs holds none of its blocks.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from threading import Lock, Thread
from typing import Final, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from workers.framing import FrameReader
from workers.ports import connect_store, open_store
from workers.transfer.layout import Piece
from workers.transfer.link import PeerLink, limit_waits
from workers.transfer.messages import (
    MAX_READ_BLOCKS,
    Check,
    Data,
    Message,
    MessageError,
    Pair,
    Read,
    Refused,
    Trailer,
    encode,
)
from workers.transfer.pool_bytes import PoolBytes
from workers.transfer.sockets import check_over
from workers.transfer.source import Source
from workers.transfer.transport import Reason, TransferFailed
from workers.types import BlockRead

PROCESS_GROUP: Final = "process_group"
_BUFFER_BYTES: Final = 16 << 20  # or one block, if that is larger
_MAX_TIMEOUT_S: Final = 20.0  # that a reader can make its owner wait
_READER, _OWNER = 0, 1
_POLL_S: Final = 0.0005
_RECEIVE_BYTES: Final = 16 << 10

_log = logging.getLogger(__name__)


class PairGroup:
    """The process group of two."""

    def __init__(self, store: TCPStore, rank: int, host: str, device: torch.device, timeout_s: float) -> None:
        """host: own address that the other can reach. Returns when both have met (gloo), or at once (NCCL).

        Raises RuntimeError.
        """
        self._device = device
        self._peer = 1 - rank
        self._timeout_s = timeout_s
        if device.type == "cuda":
            # As the process's own groups have it, an error of NCCL would end the process.
            with _CHANGING_ENVIRONMENT, _environment("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"):
                options = dist.ProcessGroupNCCL.Options()
                self._group = cast(dist.ProcessGroup, dist.ProcessGroupNCCL(store, rank, 2, options))
            return
        gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the stub's name is not there
        gloo._timeout = timedelta(seconds=timeout_s)
        gloo._threads = 1
        gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
        # Its stub leaves send and recv out.
        self._group = cast(dist.ProcessGroup, dist.ProcessGroupGloo(store, rank, 2, gloo))

    def send(self, data: torch.Tensor) -> None:
        """Raises RuntimeError, also after the timeout."""
        self._finish(self._group.send([data], self._peer, 0))

    def receive(self, data: torch.Tensor) -> None:
        """Fills all of it. Raises RuntimeError, also after the timeout."""
        self._finish(self._group.recv([data], self._peer, 0))

    def abort(self) -> None:
        """Ends it without waiting for the other. May be called twice."""
        with suppress(RuntimeError):
            self._group.abort()

    def _finish(self, work: dist.Work) -> None:
        if self._device.type != "cuda":
            work.wait(timedelta(seconds=self._timeout_s))
            return
        deadline_s = time.monotonic() + self._timeout_s
        while not work.is_completed():  # `wait` would only make the stream wait
            if time.monotonic() > deadline_s:
                self.abort()
                raise RuntimeError(f"nothing came or went for {self._timeout_s:g} s")
            time.sleep(_POLL_S)


class PairReader:
    """See `transport.Reader`. A cancelled read ends after the timeout at the latest."""

    name = PROCESS_GROUP

    def __init__(self, link: PeerLink, pool: PoolBytes, timeout_s: float) -> None:
        """Raises TransferFailed."""
        self._link = link
        self._pool = pool
        host, device = link.own_address, pool.blocks.device
        with pool.beside_steps():
            self._buffer = torch.empty(_buffer_bytes(pool), dtype=torch.uint8, device=device)
        try:
            store = open_store(host, timeout_s=timeout_s)
            link.send(Pair(host=host, port=store.port, timeout_s=timeout_s))
            self._group = PairGroup(store, _READER, host, device, timeout_s)
        except RuntimeError as error:
            raise _failed(link, error) from error
        self._store = store  # must live as long as the group

    def read(self, blocks: Sequence[BlockRead], pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            step = max(1, min(MAX_READ_BLOCKS, _BUFFER_BYTES // piece.num_bytes))  # as much as any owner has
            for start in range(0, len(blocks), step):
                with self._pool.beside_steps():
                    self._read(blocks[start : start + step], piece)

    def check(self, blocks: Sequence[BlockRead]) -> None:
        check_over(self._link, blocks)

    def cancel(self) -> None:
        self._link.cancel()

    def close(self) -> None:
        self._link.close()
        self._group.abort()

    def _read(self, blocks: Sequence[BlockRead], piece: Piece) -> None:
        link = self._link
        number = link.next_number()
        generations = tuple(block.generation for block in blocks) if link.facts.has_generations else ()
        link.send(
            Read(
                number=number,
                blocks=tuple(block.source for block in blocks),
                generations=generations,
                offset=piece.peer_offset,
                num_bytes=piece.num_bytes,
                has_checksums=False,
            )
        )
        answer = link.receive()
        if not isinstance(answer, Data) or answer.number != number:
            raise link.unexpected(answer)
        arrived = self._buffer[: len(blocks) * piece.num_bytes]
        try:
            self._group.receive(arrived)
        except RuntimeError as error:
            raise _failed(link, error) from error
        trailer = link.receive()
        if not isinstance(trailer, Trailer) or trailer.number != number:
            raise link.unexpected(trailer)
        if not trailer.is_current:
            raise TransferFailed(Reason.STALE, f"a block of {link.endpoint} changed while it was read")
        own = torch.tensor([block.own for block in blocks], device=self._buffer.device)
        place = slice(piece.own_offset, piece.own_offset + piece.num_bytes)
        self._pool.blocks[own, place] = arrived.view(len(blocks), piece.num_bytes)
        self._pool.synchronize()


class PairOwner:
    """The owner's side: a thread that serves one reader until the connection or the group fails."""

    def __init__(
        self,
        connection: socket.socket,
        pair: Pair,
        source: Source,
        frames: FrameReader[Message],
        behind: Iterable[Message],
    ) -> None:
        """Takes over the greeted connection, with the frame that is unfinished in `frames` and the messages
        that have come `behind` PAIR: a reader whose half of the group is made at once asks before the owner
        has heard of it."""
        self._connection = connection
        self._frames = frames
        self._behind = tuple(behind)
        self._pair = pair
        self._timeout_s = min(pair.timeout_s, _MAX_TIMEOUT_S)
        self._source = source
        self._thread = Thread(target=self._run, name="tandem-kv-pair", daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def cancel(self) -> None:
        """Its thread ends soon: at once, or when what it sends is through or too late."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """As `cancel`; when it returns the thread has ended. Raises RuntimeError where it has not in time."""
        self.cancel()
        self._thread.join(self._timeout_s + 1)
        if self._thread.is_alive():
            raise RuntimeError(f"a KV pair did not end within {self._timeout_s + 1:g} s")

    def _run(self) -> None:
        try:
            limit_waits(self._connection, 0, self._timeout_s)  # a reader may say nothing for long
            with self._connection, self._source.pool.beside_steps():
                self._serve()
        except (OSError, RuntimeError, MessageError, TransferFailed) as error:
            _log.info("a KV pair ends: %s", error)
        except Exception:
            _log.exception("a KV pair ends")

    def _serve(self) -> None:
        pair, pool = self._pair, self._source.pool
        store = connect_store(pair.host, pair.port, timeout_s=self._timeout_s)
        host = str(self._connection.getsockname()[0])
        group = PairGroup(store, _OWNER, host, pool.blocks.device, self._timeout_s)
        buffer = torch.empty(_buffer_bytes(pool), dtype=torch.uint8, device=pool.blocks.device)
        try:
            for message in self._behind:
                self._answer(message, group, buffer)
            while data := self._connection.recv(_RECEIVE_BYTES):
                for message in self._frames.feed(data):
                    self._answer(message, group, buffer)
        finally:
            group.abort()

    def _answer(self, message: Message, group: PairGroup, buffer: torch.Tensor) -> None:
        if isinstance(message, Read):
            self._send(message, group, buffer)
        elif isinstance(message, Check):
            self._connection.sendall(encode(self._source.compare(message)))
        else:
            raise MessageError(f"a {type(message).__name__} frame out of order")

    def _send(self, request: Read, group: PairGroup, buffer: torch.Tensor) -> None:
        count, pool = len(request.blocks), self._source.pool
        refusal = self._source.refusal(request)
        if refusal is None and count * request.num_bytes > len(buffer):
            message = f"{count} pieces of {request.num_bytes} bytes, the buffer has {len(buffer)}"
            refusal = Refused(number=request.number, reason=Reason.REFUSED.value, message=message)
        if refusal is not None:
            self._connection.sendall(encode(refusal))
            return
        blocks = torch.tensor(request.blocks, device=buffer.device)
        gathered = buffer[: count * request.num_bytes].view(count, request.num_bytes)
        gathered.copy_(pool.blocks[blocks, request.offset : request.offset + request.num_bytes])
        pool.synchronize()
        is_current = self._source.is_current(request)
        self._connection.sendall(encode(Data(number=request.number)))
        group.send(gathered.view(-1))
        self._connection.sendall(encode(Trailer(number=request.number, is_current=is_current, checksums=())))


def _buffer_bytes(pool: PoolBytes) -> int:
    return max(_BUFFER_BYTES, pool.block_bytes)


def _failed(link: PeerLink, error: RuntimeError) -> TransferFailed:
    said = str(error).splitlines()[0]
    reason = Reason.TIMEOUT if "imed out" in said or "imeout" in said else Reason.UNREACHABLE
    return TransferFailed(reason, f"KV blocks of {link.endpoint}: {said}")


_CHANGING_ENVIRONMENT = Lock()  # all threads have one


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """A variable that is read while an object is made."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
