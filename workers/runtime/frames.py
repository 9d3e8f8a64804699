"""Frames on the control connections of a group: 4-byte little-endian body length, 1 byte kind, body.

Bodies are int32 arrays (steps), short JSON (facts at start), fixed structs (handshake), UTF-8 text (faults)
or what the users of a link agree on (orders, reports). Nothing is ever unpickled. Not covered: encryption;
the addresses are loopback or the cluster's own network.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from enum import IntEnum
from threading import Lock
from typing import NamedTuple

_HEADER = struct.Struct("<IB")
_READ_BYTES = 1 << 16
MAX_BODY_BYTES = 64 << 20


class FrameKind(IntEnum):
    """Who sends it, and why."""

    CHALLENGE = 1  # rank 0: a nonce to sign
    HELLO = 2  # follower: rank, pid, signature
    FACTS = 3  # follower: what it found, to be compared or reduced over the ranks
    AGREED = 4  # rank 0: what all ranks go on with
    STEP = 5  # rank 0: arrays of a step
    HEARTBEAT = 6  # both: still here; from a follower with the steps it has begun and finished
    FAULT = 7  # both: why the sender cannot go on
    STOP = 8  # rank 0: an orderly end
    ORDER = 9  # rank 0: something to do beside the steps
    REPORT = 10  # follower: what came of an order


class PeerClosed(Exception):
    """The other end closed the connection: its process ended."""


class PeerSilent(Exception):
    """Nothing came, or nothing could be sent, for the whole timeout."""


class ProtocolError(Exception):
    """The other end sent something that is no frame of ours."""


class Frame(NamedTuple):
    """One message."""

    kind: FrameKind
    body: bytes


class FrameSocket:
    """A connected socket that carries frames. Sending is thread-safe; one thread at a time may receive."""

    def __init__(self, connection: socket.socket, *, timeout_s: float) -> None:
        connection.settimeout(timeout_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._timeout_s = timeout_s
        self._sending = Lock()
        self._received = bytearray()

    def fileno(self) -> int:
        return self._connection.fileno()

    @property
    def own_address(self) -> str:
        return str(self._connection.getsockname()[0])

    def set_timeout(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._connection.settimeout(timeout_s)

    def send(self, kind: FrameKind, body: bytes = b"") -> None:
        """Raises PeerClosed or PeerSilent."""
        with self._sending:
            self._send_all(_HEADER.pack(len(body), kind) + body)

    def send_if_idle(self, kind: FrameKind, body: bytes = b"") -> None:
        """Sends unless another thread is sending or the buffer is full: heartbeats must not wait."""
        if not self._sending.acquire(blocking=False):
            return
        try:
            message = _HEADER.pack(len(body), kind) + body
            try:
                sent = self._connection.send(message, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError as error:
                raise PeerClosed(str(error)) from error
            self._send_all(message[sent:])
        finally:
            self._sending.release()

    def receive(self, awake_s: float = 0.0) -> Frame:
        """Waits for one frame, for the first `awake_s` without sleep, as a core that sleeps wakes up late;
        whoever else wants the core has it. Raises PeerClosed, PeerSilent or ProtocolError."""
        if awake_s and not self._received:
            self._stay_awake(time.monotonic() + awake_s)
        while (frame := self._next_received()) is None:
            self._read_more()
        return frame

    def receive_greeting(self, within_s: float, max_body_bytes: int) -> Frame:
        """A frame of a peer that is not known yet: whole within that time, and no larger. Raises as
        `receive`."""
        deadline_s = time.monotonic() + within_s
        try:
            while (frame := self._next_received(max_body_bytes)) is None:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise PeerSilent(f"no greeting within {within_s:g} s")
                self._connection.settimeout(left_s)
                self._read_more()
        finally:
            self._connection.settimeout(self._timeout_s)
        return frame

    def receive_ready(self) -> list[Frame]:
        """From a readable socket: the frames that came along with earlier ones, as with a greeting, else
        those that one more read completes. Raises as `receive`."""
        frames = self._whole_frames()
        if not frames:  # a peer that has left may have said why before
            self._read_more()
            frames = self._whole_frames()
        return frames

    def close(self) -> None:
        self._connection.close()

    def _send_all(self, message: bytes) -> None:
        try:
            self._connection.sendall(message)
        except TimeoutError as error:
            raise PeerSilent(f"took no data for {self._timeout_s:g} s") from error
        except OSError as error:
            raise PeerClosed(str(error)) from error

    def _stay_awake(self, deadline_s: float) -> None:
        """Returns when there is something to read, or at the deadline."""
        poller = select.poll()
        poller.register(self._connection, select.POLLIN)
        while not poller.poll(0) and time.monotonic() < deadline_s:
            os.sched_yield()

    def _read_more(self) -> None:
        try:
            data = self._connection.recv(_READ_BYTES)
        except TimeoutError as error:
            raise PeerSilent(f"silent for {self._timeout_s:g} s") from error
        except OSError as error:
            raise PeerClosed(str(error)) from error
        if not data:
            raise PeerClosed("connection closed")
        self._received += data

    def _whole_frames(self) -> list[Frame]:
        frames = []
        while (frame := self._next_received()) is not None:
            frames.append(frame)
        return frames

    def _next_received(self, max_body_bytes: int = MAX_BODY_BYTES) -> Frame | None:
        if len(self._received) < _HEADER.size:
            return None
        length, number = _HEADER.unpack_from(self._received)
        if length > max_body_bytes:
            raise ProtocolError(f"frame of {length} bytes, the limit is {max_body_bytes}")
        try:
            kind = FrameKind(number)
        except ValueError:
            raise ProtocolError(f"unknown frame kind {number}") from None
        end = _HEADER.size + length
        if len(self._received) < end:
            return None
        body = bytes(memoryview(self._received)[_HEADER.size : end])
        del self._received[:end]
        return Frame(kind, body)
