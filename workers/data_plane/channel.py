"""One framed connection between a group and a client, as an asyncio protocol: see `workers.data_plane.wire`.

Incoming messages are handed to a callback synchronously, in order; nothing here awaits, so one slow peer
delays no other. Outgoing bytes are bounded: a peer that does not read is dropped, never waited for.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from workers.data_plane.wire import (
    MAX_FRAME_BYTES,
    MAX_GREETING_BYTES,
    NONCE_BYTES,
    PROTOCOL_VERSION,
    Challenge,
    Goodbye,
    Hello,
    Message,
    Welcome,
    WireError,
    encode,
    frame_reader,
    hello_mac,
    welcome_mac,
)
from workers.types import GroupInfo

MAX_OUTGOING_BYTES = 8 << 20  # written but not taken by the peer

_LINGER_S = 5.0


class Channel(asyncio.Protocol):
    """A connection that speaks frames.

    `on_message(channel, message)` may raise WireError to drop the peer. `on_closed(channel, reason)` comes
    exactly once for a connection that was made.
    """

    def __init__(
        self,
        *,
        on_message: Callable[[Channel, Message], None],
        on_closed: Callable[[Channel, str], None],
        on_open: Callable[[Channel], None] | None = None,
        max_outgoing_bytes: int = MAX_OUTGOING_BYTES,
    ) -> None:
        self._on_message = on_message
        self._on_closed = on_closed
        self._on_open = on_open
        self._reader = frame_reader(MAX_GREETING_BYTES)
        self._max_outgoing_bytes = max_outgoing_bytes
        self._large_bytes = 0  # of a write above the limit that may still be waiting
        self._transport: asyncio.Transport | None = None
        self._reason: str | None = None
        self.heard_s = asyncio.get_running_loop().time()  # loop time at which bytes last came

    @property
    def is_open(self) -> bool:
        """Whether anything can still be sent."""
        return self._transport is not None and self._reason is None

    def trust(self) -> None:
        """The peer knows the secret: frames may now be large."""
        self._reader.max_frame_bytes = MAX_FRAME_BYTES

    def send(self, *messages: Message) -> None:
        """Writes messages at once. Raises WireError when one does not fit into a frame."""
        self.write(b"".join([encode(message) for message in messages]))

    def write(self, data: bytes) -> None:
        """Writes encoded frames, or drops the peer when too much is waiting for it already: more than the
        limit, beside one write that is larger than that by itself, as a snapshot may be."""
        if self._transport is None or self._reason is not None:
            return
        waiting = self._transport.get_write_buffer_size()
        if waiting <= self._max_outgoing_bytes:
            self._large_bytes = 0
        elif waiting > self._max_outgoing_bytes + self._large_bytes:
            self.drop(f"the peer does not read: {waiting} bytes are waiting for it")
            return
        if len(data) > self._max_outgoing_bytes:
            self._large_bytes = max(self._large_bytes, len(data))
        self._transport.write(data)

    def close(self, reason: str) -> None:
        """Sends what is waiting, then closes; a peer that does not take it has `_LINGER_S`."""
        if self._transport is not None and self._reason is None:
            self._reason = reason
            self._transport.close()
            asyncio.get_running_loop().call_later(_LINGER_S, self._transport.abort)

    def drop(self, reason: str) -> None:
        """Closes at once; what is waiting is lost."""
        if self._transport is not None:
            self._reason = self._reason or reason
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not asserted: the transports of uvloop, on which Ray's processes run, are no asyncio.Transport.
        self._transport = cast(asyncio.Transport, transport)
        raw = transport.get_extra_info("socket")
        if raw is not None and raw.family in (socket.AF_INET, socket.AF_INET6):
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._on_open is not None:
            self._on_open(self)

    def data_received(self, data: bytes) -> None:
        self.heard_s = asyncio.get_running_loop().time()
        if self._reason is not None:
            return
        try:
            for message in self._reader.feed(data):
                self._on_message(self, message)
                if not self.is_open:
                    return
        except WireError as error:
            self.drop(str(error))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        reason = self._reason or (f"connection lost: {exc}" if exc else "the peer closed the connection")
        self._reason = reason
        self._on_closed(self, reason)


class SilenceCheck:
    """Whether a periodic check for silent peers may judge now. One that comes late may not: this process has
    not come to run itself, and what peers have sent may just be unread."""

    def __init__(self, period_s: float) -> None:
        self._most_s = 2 * period_s + 0.5
        self._last_s = asyncio.get_running_loop().time()

    def may_judge(self, now_s: float) -> bool:
        """Call at every check, with the loop's time."""
        last_s, self._last_s = self._last_s, now_s
        return now_s - last_s <= self._most_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientIdentity:
    """Who a client says it is, and how it proves it."""

    client_id: str  # unique among the clients of a group; a second connection of the same id ends the first
    secret: bytes  # of the application
    subscribes: bool  # wants the log of cached blocks


class HandshakeFailed(Exception):
    """No connection: nobody listens, the wrong secret, another protocol, or no answer in time."""


class _Handshake:
    """Client side of the greeting; afterwards it passes every message on."""

    def __init__(
        self,
        identity: ClientIdentity,
        welcomed: asyncio.Future[GroupInfo],
        on_message: Callable[[Channel, Message], None],
        on_closed: Callable[[Channel, str], None],
    ) -> None:
        self._identity = identity
        self._welcomed = welcomed
        self._on_message = on_message
        self._on_closed = on_closed
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._server_nonce: bytes | None = None
        self._done = False
        self._abandoned = False

    def message(self, channel: Channel, message: Message) -> None:
        if self._done:
            self._on_message(channel, message)
        elif isinstance(message, Challenge) and self._server_nonce is None:
            self._answer(channel, message)
        elif isinstance(message, Welcome) and self._server_nonce is not None:
            self._check(channel, message)
        elif isinstance(message, Goodbye):
            raise WireError(message.reason)
        else:
            raise WireError(f"{type(message).__name__} in the middle of the greeting")

    def abandon(self) -> None:
        """The caller is gone: no welcome is taken any more."""
        self._abandoned = True

    def closed(self, channel: Channel, reason: str) -> None:
        if self._done:
            self._on_closed(channel, reason)
        elif not (self._abandoned or self._welcomed.done()):
            self._welcomed.set_exception(HandshakeFailed(reason))

    def _answer(self, channel: Channel, challenge: Challenge) -> None:
        if challenge.version != PROTOCOL_VERSION:
            raise WireError(f"the group speaks protocol {challenge.version}, this client {PROTOCOL_VERSION}")
        identity = self._identity
        self._server_nonce = challenge.nonce
        mac = hello_mac(identity.secret, challenge.nonce, self._nonce, identity.client_id)
        channel.send(
            Hello(client_id=identity.client_id, nonce=self._nonce, mac=mac, subscribes=identity.subscribes)
        )
        channel.trust()  # the snapshot may follow the welcome in the same read; its mac is checked first

    def _check(self, channel: Channel, welcome: Welcome) -> None:
        assert self._server_nonce is not None
        identity = self._identity
        expected = welcome_mac(identity.secret, self._server_nonce, self._nonce, identity.client_id)
        if not hmac.compare_digest(expected, welcome.mac):
            raise WireError("the server does not know the application's secret")
        if self._abandoned or self._welcomed.done():
            raise WireError("welcomed too late")
        self._done = True
        self._welcomed.set_result(welcome.info)
        self._on_message(channel, welcome)


async def connect(
    host: str,
    port: int,
    identity: ClientIdentity,
    *,
    on_message: Callable[[Channel, Message], None],
    on_closed: Callable[[Channel, str], None],
    timeout_s: float = 5.0,
) -> tuple[Channel, GroupInfo]:
    """Connects and greets. `on_message` gets the verified Welcome first and then everything after it, also
    before this returns. Raises HandshakeFailed. `on_closed` is called when the Welcome has been passed on,
    also if this is cancelled after that, and never without it."""
    loop = asyncio.get_running_loop()
    welcomed: asyncio.Future[GroupInfo] = loop.create_future()
    handshake = _Handshake(identity, welcomed, on_message, on_closed)
    channel: Channel | None = None
    try:
        async with asyncio.timeout(timeout_s):
            _, channel = await loop.create_connection(
                lambda: Channel(on_message=handshake.message, on_closed=handshake.closed), host, port
            )
            return channel, await welcomed
    except BaseException as error:  # cancellation too: the connection must not outlive its caller
        handshake.abandon()
        if channel is not None:
            channel.drop("the greeting failed")
        if isinstance(error, TimeoutError):
            raise HandshakeFailed(f"no welcome from {host}:{port} within {timeout_s:g} s") from error
        if isinstance(error, OSError):
            raise HandshakeFailed(f"cannot connect to {host}:{port}: {error}") from error
        if isinstance(error, HandshakeFailed):
            raise HandshakeFailed(f"no welcome from {host}:{port}: {error}") from error
        raise
