"""Typed messages as frames on a stream of bytes.

    frame = length of the rest (4 bytes, little endian) | kind (1 byte) | body (msgpack)

A body is read against the type of its kind and never evaluated, and nothing is allocated by a length that a
peer claims. Every protocol has its own list of types, and its own error for bytes that do not fit it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Generic, TypeVar

import msgspec

HEADER_BYTES: Final = 5

_LENGTH_BYTES: Final = 4
_ENCODER: Final = msgspec.msgpack.Encoder()

Message = TypeVar("Message")


class FrameProtocol(Generic[Message]):
    """The messages of one protocol."""

    def __init__(self, types: tuple[type[Message], ...], error: type[Exception]) -> None:
        """A type's position is its kind byte, so entries may only be added at the end."""
        self.error = error
        self._types = types
        self._kinds = {kind: number for number, kind in enumerate(types)}
        self._decoders = tuple(msgspec.msgpack.Decoder(kind) for kind in types)

    def encode(self, message: Message, max_frame_bytes: int) -> bytes:
        """The frame of a message. Raises the protocol's error when it cannot be written or is too large."""
        frame = bytearray(HEADER_BYTES)
        try:
            _ENCODER.encode_into(message, frame, HEADER_BYTES)
        except (ValueError, OverflowError) as error:  # lone surrogates, integers beyond 64 bits
            name = type(message).__name__
            raise self.error(f"a {name} frame cannot be written: {error}") from error
        length = len(frame) - _LENGTH_BYTES
        if length > max_frame_bytes:
            name = type(message).__name__
            raise self.error(f"a {name} frame has {length} bytes, the limit is {max_frame_bytes}")
        frame[:_LENGTH_BYTES] = length.to_bytes(_LENGTH_BYTES, "little")
        frame[_LENGTH_BYTES] = self._kinds[type(message)]
        return bytes(frame)

    def decode(self, kind: int, body: bytes | bytearray | memoryview) -> Message:
        """The message in the body of a frame of this kind. Raises the protocol's error."""
        if kind >= len(self._types):
            raise self.error(f"a frame of unknown kind {kind}")
        try:
            return self._decoders[kind].decode(body)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise self.error(f"a malformed {self._types[kind].__name__} frame: {error}") from error

    def frame_length(self, start: bytes | bytearray, max_frame_bytes: int) -> int:
        """Bytes of a frame behind its length field, with which `start` begins. Raises the protocol's
        error."""
        length = int.from_bytes(start[:_LENGTH_BYTES], "little")
        if not 1 <= length <= max_frame_bytes:
            raise self.error(f"a frame of {length} bytes; allowed are 1 to {max_frame_bytes}")
        return length


class FrameReader(Generic[Message]):
    """Cuts a stream of bytes into messages. Holds at most one unfinished frame and what was fed with it."""

    def __init__(self, protocol: FrameProtocol[Message], max_frame_bytes: int) -> None:
        self.max_frame_bytes = max_frame_bytes  # may be raised once the peer is known
        self._protocol = protocol
        self._buffer = bytearray()

    @property
    def is_inside_frame(self) -> bool:
        """Whether bytes of an unfinished frame have come."""
        return bool(self._buffer)

    def feed(self, data: bytes) -> Iterator[Message]:
        """Messages completed by these bytes, in order. Raises the protocol's error at the first bad one; do
        not go on with the stream after that."""
        self._buffer += data
        start = 0
        try:
            while (end := self._end_of_frame(start)) is not None:
                body_start = start + HEADER_BYTES
                kind, body = self._buffer[body_start - 1], bytes(self._buffer[body_start:end])
                start = end
                yield self._protocol.decode(kind, body)
        finally:
            del self._buffer[:start]

    def _end_of_frame(self, start: int) -> int | None:
        """Where the frame at `start` ends; None while it is incomplete."""
        if len(self._buffer) - start < _LENGTH_BYTES:
            return None
        field = self._buffer[start : start + _LENGTH_BYTES]
        end = start + _LENGTH_BYTES + self._protocol.frame_length(field, self.max_frame_bytes)
        return end if len(self._buffer) >= end else None
