"""The reader's connection to the rank that owns the blocks: greeting, requests, raw bytes.

Blocking: Python waits until a time, and what C++ receives has a timeout of the system on every call. One
thread uses it; any may `cancel`, which makes the other's wait end.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import select
import socket
import struct
import time
from array import array
from typing import NamedTuple

from workers.framing import HEADER_BYTES
from workers.kernels import BlockStream
from workers.transfer.messages import (
    MAX_FRAME_BYTES,
    MAX_GREETING_BYTES,
    NONCE_BYTES,
    PROTOCOL,
    PROTOCOL_VERSION,
    Challenge,
    Hello,
    Message,
    MessageError,
    PeerFacts,
    Refused,
    Welcome,
    encode,
    hello_mac,
    transfer_key,
    welcome_mac,
)
from workers.transfer.transport import Reason, TransferFailed


class Endpoint(NamedTuple):
    """Where the agent of a rank listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class PeerLink:
    """A greeted connection."""

    def __init__(self, endpoint: Endpoint, secret: bytes, *, timeout_s: float) -> None:
        """Connects and greets. timeout_s: of every wait, for a frame or for the bytes of a block.

        Raises TransferFailed.
        """
        self.endpoint = endpoint
        self._timeout_s = timeout_s
        self._cancelled = False
        self._number = 0
        self._frame = array("B", bytes(HEADER_BYTES - 1 + MAX_FRAME_BYTES))  # for C++
        try:
            self._socket = socket.create_connection(endpoint, timeout=timeout_s)
        except OSError as error:
            raise self._failed(Reason.UNREACHABLE, f"no connection: {error}") from error
        try:
            limit_waits(self._socket, timeout_s, timeout_s)
            self.facts = self._greet(transfer_key(secret))
        except BaseException:
            self._socket.close()
            raise

    @property
    def own_address(self) -> str:
        """By which the owner sees this machine."""
        return str(self._socket.getsockname()[0])

    def next_number(self) -> int:
        """For a request."""
        self._number = (self._number + 1) % (1 << 32)
        return self._number

    def send(self, message: Message) -> None:
        """Raises TransferFailed."""
        left = memoryview(encode(message))
        deadline_s = time.monotonic() + self._timeout_s
        while left.nbytes:
            self.raise_if_cancelled()
            try:
                left = left[self._socket.send(left, socket.MSG_DONTWAIT) :]
            except BlockingIOError as error:
                self._wait(select.POLLOUT, deadline_s, error)
            except OSError as error:
                raise self._lost(error) from error

    def receive(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> Message:
        """One frame. Raises TransferFailed, also with what a REFUSED says."""
        header = bytearray(HEADER_BYTES)
        self.receive_into(memoryview(header))
        body = bytearray(self._frame_length(header, max_frame_bytes) - 1)
        self.receive_into(memoryview(body))
        return self._message(header[-1], body)

    def receive_into(self, target: memoryview) -> None:
        """Fills all of it. Raises TransferFailed."""
        deadline_s = time.monotonic() + self._timeout_s
        while target.nbytes:
            self.raise_if_cancelled()
            try:
                got = self._socket.recv_into(target, target.nbytes, socket.MSG_DONTWAIT)
            except BlockingIOError as error:
                self._wait(select.POLLIN, deadline_s, error)
                continue
            except OSError as error:
                raise self._lost(error) from error
            if got == 0:
                raise self._ended()
            target = target[got:]
            if target.nbytes and time.monotonic() > deadline_s:
                raise self._lost(TimeoutError())

    def receive_blocks(self, before: Message, stream: BlockStream) -> Message:
        """Takes `before`, fills all of the stream, and returns the message behind it; or what came instead
        of `before`: then nothing is filled. Raises TransferFailed.
        """
        self.raise_if_cancelled()
        try:
            stream.receive(self._socket.fileno(), self._timeout_s, encode(before), self._frame)
        except OSError as error:
            raise self._lost(error) from error
        except EOFError as error:
            raise self._ended() from error
        header = self._frame[:HEADER_BYTES].tobytes()
        body_bytes = self._frame_length(header, MAX_FRAME_BYTES) - 1
        return self._message(header[-1], self._frame[HEADER_BYTES : HEADER_BYTES + body_bytes].tobytes())

    def unexpected(self, message: Message) -> TransferFailed:
        """The error for an answer that does not belong here."""
        return self._failed(Reason.PROTOCOL, f"a {type(message).__name__} frame out of order")

    def cancel(self) -> None:
        """Ends every wait of the other thread, now and later."""
        self._cancelled = True
        with contextlib.suppress(OSError):  # not connected any more
            self._socket.shutdown(socket.SHUT_RDWR)

    def raise_if_cancelled(self) -> None:
        if self._cancelled:
            raise self._failed(Reason.CANCELLED, "the transfer was cancelled")

    def close(self) -> None:
        self._socket.close()

    def _wait(self, event: int, deadline_s: float, error: BlockingIOError) -> None:
        """Until the socket may be tried again. Raises TransferFailed at the deadline.

        Not by the system's timeout: Python tries again after a signal, and that begins anew then.
        """
        poller = select.poll()
        poller.register(self._socket, event)
        if not poller.poll(max(0.0, deadline_s - time.monotonic()) * 1e3):
            raise self._lost(error) from error

    def _greet(self, key: bytes) -> PeerFacts:
        challenge = self.receive(MAX_GREETING_BYTES)
        if not isinstance(challenge, Challenge):
            raise self.unexpected(challenge)
        if challenge.version != PROTOCOL_VERSION:
            raise self._failed(
                Reason.REFUSED,
                f"the owner speaks protocol {challenge.version}, this reader {PROTOCOL_VERSION}",
            )
        nonce = secrets.token_bytes(NONCE_BYTES)
        self.send(Hello(nonce=nonce, mac=hello_mac(key, challenge.nonce, nonce)))
        welcome = self.receive(MAX_GREETING_BYTES)
        if not isinstance(welcome, Welcome):
            raise self.unexpected(welcome)
        if not hmac.compare_digest(welcome.mac, welcome_mac(key, challenge.nonce, nonce, welcome.facts)):
            raise self._failed(Reason.REFUSED, "the owner does not know the application's secret")
        return welcome.facts

    def _frame_length(self, start: bytes | bytearray, max_frame_bytes: int) -> int:
        try:
            return PROTOCOL.frame_length(start, max_frame_bytes)
        except MessageError as error:
            raise self._failed(Reason.PROTOCOL, str(error)) from error

    def _message(self, kind: int, body: bytes | bytearray) -> Message:
        try:
            message = PROTOCOL.decode(kind, body)
        except MessageError as error:
            raise self._failed(Reason.PROTOCOL, str(error)) from error
        if isinstance(message, Refused):
            known = {reason.value: reason for reason in Reason}
            raise self._failed(known.get(message.reason, Reason.REFUSED), message.message)
        return message

    def _ended(self) -> TransferFailed:
        if self._cancelled:
            return self._failed(Reason.CANCELLED, "the transfer was cancelled")
        return self._failed(Reason.UNREACHABLE, "the owner closed the connection")

    def _lost(self, error: OSError) -> TransferFailed:
        if self._cancelled:
            return self._failed(Reason.CANCELLED, "the transfer was cancelled")
        if isinstance(error, TimeoutError | BlockingIOError):
            return self._failed(Reason.TIMEOUT, f"no answer within {self._timeout_s:g} s")
        return self._failed(Reason.UNREACHABLE, f"connection lost: {error}")

    def _failed(self, reason: Reason, message: str) -> TransferFailed:
        return TransferFailed(reason, f"KV blocks of {self.endpoint}: {message}")


def limit_waits(connection: socket.socket, receive_s: float, send_s: float) -> None:
    """Timeouts of the system, 0: none. Python's own cost two more calls for each."""
    connection.settimeout(None)
    for option, limit_s in ((socket.SO_RCVTIMEO, receive_s), (socket.SO_SNDTIMEO, send_s)):
        timeval = struct.pack("@ll", int(limit_s), int(limit_s % 1 * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, option, timeval)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
