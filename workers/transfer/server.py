"""The owner's side: one thread that lets readers in and sends them bytes of the pool.

Nothing that a peer does can hurt this process. Who does not show in time that it knows the secret is dropped;
frames are small and bounded before they are read; block numbers are compared with the pool; no memory is
taken by a claimed size; who stalls in the middle of a frame or takes no bytes is dropped; and no peer is
served for longer than a turn while others wait.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import selectors
import socket
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from threading import Thread
from typing import Final

from workers.framing import FrameReader
from workers.kernels import BlockAnswer
from workers.transfer.messages import (
    MAX_AHEAD,
    MAX_FRAME_BYTES,
    NONCE_BYTES,
    Challenge,
    Check,
    Hello,
    Message,
    MessageError,
    Pair,
    PeerFacts,
    Read,
    Welcome,
    encode,
    frame_reader,
    hello_mac,
    transfer_key,
    welcome_mac,
)
from workers.transfer.process_group import PairOwner
from workers.transfer.source import BARRIER, Source

_GREETING_TIMEOUT_S: Final = 3.0
_FRAME_TIMEOUT_S: Final = 5.0  # from the first byte of a frame to its last
_SEND_TIMEOUT_S: Final = 10.0  # without a byte taken by the peer
_SWEEP_S: Final = 0.25
_MAX_GREETING_PEERS: Final = 32
_MAX_PEERS: Final = 512
_MAX_PAIRS: Final = 64  # each has a thread
_TURN_BYTES: Final = 4 << 20  # to one peer, before the others are looked at
_VECTOR_BYTES: Final = 256 << 10  # gathered before the kernel is called: a large block goes alone
_VECTOR_PARTS: Final = 256
_RECEIVE_BYTES: Final = 16 << 10
_STOP_TIMEOUT_S: Final = 5.0
_NEVER_S: Final = float("inf")
# A reader may say nothing for long; that its machine is gone shows after this many seconds and probes.
_KEEP_ALIVE: Final = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 15), (socket.TCP_KEEPCNT, 4))

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Peer:
    connection: socket.socket
    address: str
    nonce: bytes
    frame_by_s: float  # when the greeting, then a begun frame, must have come; infinity: none is under way
    send_by_s: float = _NEVER_S  # when the peer must have taken some bytes; infinity: there are none
    frames: FrameReader[Message] = field(default_factory=frame_reader)
    is_known: bool = False
    requests: deque[Read | Check] = field(default_factory=deque)
    answer: Iterator[memoryview | BlockAnswer] | None = None
    waiting: deque[memoryview] = field(default_factory=deque)  # not yet taken by the kernel
    blocks: BlockAnswer | None = None  # behind what waits
    wanted: int = selectors.EVENT_READ  # what the selector looks for
    is_at_barrier: bool = False  # the answer goes on when nothing waits

    @property
    def has_to_send(self) -> bool:
        return bool(self.waiting or self.answer is not None or self.requests)


class _Dropped(Exception):
    """This peer is not served any more, and why."""


class BlockServer:
    """Serves one pool. `close` ends it for good."""

    def __init__(self, listener: socket.socket, source: Source, facts: PeerFacts, secret: bytes) -> None:
        """Takes over the listening socket and starts the thread."""
        self._listener = listener
        self._source = source
        self._facts = facts
        self._key = transfer_key(secret)
        self._peers: set[_Peer] = set()
        self._pairs: set[PairOwner] = set()
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._is_closing = False
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._thread = Thread(target=self._serve, name="tandem-kv-server", daemon=True)
        self._thread.start()

    @property
    def num_peers(self) -> int:
        """Connections, greeted or not."""
        return len(self._peers) + sum(not pair.is_over for pair in self._pairs)

    def close(self) -> None:
        """Drops all readers and ends the thread. May be called twice."""
        self._is_closing = True
        with contextlib.suppress(OSError):
            self._wake_writer.send(b"x")
        self._thread.join(_STOP_TIMEOUT_S)
        if self._thread.is_alive():
            raise RuntimeError(f"the KV server thread did not end within {_STOP_TIMEOUT_S:g} s")
        with contextlib.ExitStack() as rest:  # all of them, also when one does not end
            for pair in self._pairs:
                pair.cancel()
                rest.callback(pair.close)

    def _serve(self) -> None:
        try:
            while not self._is_closing:
                for key, events in self._selector.select(_SWEEP_S):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif isinstance(key.data, _Peer):
                        self._attend(key.data, events)
                self._sweep()
        finally:
            for peer in list(self._peers):
                self._drop(peer)
            self._listener.close()
            self._selector.close()
            self._wake_reader.close()
            self._wake_writer.close()

    def _accept(self) -> None:
        try:
            connection, address = self._listener.accept()
        except OSError as error:
            _log.warning("a KV reader could not be accepted: %s", error)
            time.sleep(0.01)  # out of descriptors: it will be tried again
            return
        num_greeting = sum(not peer.is_known for peer in self._peers)
        if num_greeting >= _MAX_GREETING_PEERS or len(self._peers) >= _MAX_PEERS:
            connection.close()
            return
        try:
            _set_up(connection)
        except OSError as error:  # as when the peer is gone already
            _log.info("a KV reader at %s could not be served: %s", address[0], error)
            connection.close()
            return
        peer = _Peer(
            connection=connection,
            address=str(address[0]),
            nonce=secrets.token_bytes(NONCE_BYTES),
            frame_by_s=time.monotonic() + _GREETING_TIMEOUT_S,
        )
        self._peers.add(peer)
        self._selector.register(connection, selectors.EVENT_READ, peer)
        peer.waiting.append(memoryview(encode(Challenge(nonce=peer.nonce))))
        self._attend(peer, selectors.EVENT_WRITE)

    def _attend(self, peer: _Peer, events: int) -> None:
        """One turn of one peer."""
        try:
            if events & selectors.EVENT_READ:
                self._receive(peer)
            if peer not in self._peers:  # handed over
                return
            if peer.has_to_send:
                self._send(peer)
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.has_to_send else 0)
            if wanted != peer.wanted:
                self._selector.modify(peer.connection, wanted, peer)
                peer.wanted = wanted
        except (_Dropped, MessageError, OSError) as error:
            self._drop(peer, str(error))
        except Exception:
            _log.exception("a KV reader at %s is dropped", peer.address)  # ours to mend, but serve the others
            self._drop(peer)

    def _receive(self, peer: _Peer) -> None:
        try:
            data = peer.connection.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return
        if not data:
            raise _Dropped("it closed the connection")
        messages = deque(peer.frames.feed(data))
        has_whole = bool(messages)
        while messages:
            message = messages.popleft()
            if isinstance(message, Pair) and peer.is_known and not peer.has_to_send:
                self._hand_over(peer, message, messages)
                return
            self._take(peer, message)
        if not peer.is_known:
            return
        if not peer.frames.is_inside_frame:
            peer.frame_by_s = _NEVER_S
        elif has_whole or peer.frame_by_s == _NEVER_S:
            peer.frame_by_s = time.monotonic() + _FRAME_TIMEOUT_S

    def _take(self, peer: _Peer, message: Message) -> None:
        if peer.is_known and isinstance(message, Read | Check):
            if len(peer.requests) >= MAX_AHEAD:
                raise _Dropped(f"it asked for more than {MAX_AHEAD} answers ahead")
            if not peer.has_to_send:
                peer.send_by_s = time.monotonic() + _SEND_TIMEOUT_S
            peer.requests.append(message)
        elif not peer.is_known and isinstance(message, Hello):
            if not hmac.compare_digest(message.mac, hello_mac(self._key, peer.nonce, message.nonce)):
                raise _Dropped("it does not know the application's secret")
            peer.is_known = True
            peer.send_by_s = time.monotonic() + _SEND_TIMEOUT_S
            peer.frames.max_frame_bytes = MAX_FRAME_BYTES
            mac = welcome_mac(self._key, peer.nonce, message.nonce, self._facts)
            peer.waiting.append(memoryview(encode(Welcome(mac=mac, facts=self._facts))))
        else:
            raise _Dropped(f"it sent a {type(message).__name__} frame out of order")

    def _hand_over(self, peer: _Peer, pair: Pair, behind: Iterable[Message]) -> None:
        """behind: what has come with it, which is for the pair."""
        self._pairs = {known for known in self._pairs if not known.is_over}
        if len(self._pairs) >= _MAX_PAIRS:
            raise _Dropped(f"there are {_MAX_PAIRS} process groups already")
        self._selector.unregister(peer.connection)
        self._peers.discard(peer)
        self._pairs.add(PairOwner(peer.connection, pair, self._source, peer.frames, behind))

    def _send(self, peer: _Peer) -> None:
        """Until the kernel takes no more, nothing is left, or the turn is over."""
        left = _TURN_BYTES
        while left > 0:
            self._refill(peer)
            try:
                sent = _send_waiting(peer) or _send_blocks(peer, left)
            except BlockingIOError:
                return
            if not sent:
                break
            left -= sent
            peer.send_by_s = time.monotonic() + _SEND_TIMEOUT_S
        if not peer.has_to_send:
            peer.send_by_s = _NEVER_S

    def _refill(self, peer: _Peer) -> None:
        """The next bytes of the answers; what follows a barrier only when all before it is sent."""
        num_bytes = sum(part.nbytes for part in peer.waiting)
        while peer.blocks is None and num_bytes < _VECTOR_BYTES and len(peer.waiting) < _VECTOR_PARTS:
            if peer.is_at_barrier:
                if peer.waiting:
                    return
                peer.is_at_barrier = False
            if peer.answer is None:
                if not peer.requests:
                    return
                peer.answer = self._source.answer(peer.requests.popleft())
            part = next(peer.answer, None)
            if part is None:
                peer.answer = None
            elif isinstance(part, BlockAnswer):
                peer.blocks = part
            elif part is BARRIER:
                peer.is_at_barrier = True
            else:
                peer.waiting.append(part)
                num_bytes += part.nbytes

    def _sweep(self) -> None:
        now = time.monotonic()
        for peer in [peer for peer in self._peers if min(peer.frame_by_s, peer.send_by_s) < now]:
            self._drop(peer, "it did not go on in time")

    def _drop(self, peer: _Peer, why: str = "") -> None:
        if why:
            _log.info("KV reader at %s: %s", peer.address, why)
        self._peers.discard(peer)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(peer.connection)
        peer.connection.close()


def _send_waiting(peer: _Peer) -> int:
    """What the kernel takes of it."""
    if not peer.waiting:
        return 0
    left = sent = peer.connection.sendmsg(peer.waiting)
    while left:
        first = peer.waiting.popleft()
        if left < first.nbytes:
            peer.waiting.appendleft(first[left:])
            break
        left -= first.nbytes
    return sent


def _send_blocks(peer: _Peer, max_bytes: int) -> int:
    """What the kernel takes of the blocks and the frames around them."""
    if peer.blocks is None:
        return 0
    sent = peer.blocks.send(peer.connection.fileno(), max_bytes)
    if peer.blocks.is_done:
        peer.blocks = None
    return sent


def _set_up(connection: socket.socket) -> None:
    """Raises OSError."""
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEP_ALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
