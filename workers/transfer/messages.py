"""Frames between a rank that reads KV blocks and the rank that owns them.

Frames are those of `workers.framing`. Life of a connection (R reader, O owner):

    O  CHALLENGE     nonce, protocol version
    R  HELLO         nonce, HMAC over both nonces with a key made of the application's secret
    O  WELCOME       HMAC of the owner, and what it is: rank, layout, pool, where its memory lies
    R  READ          blocks with generations; answered by
    O  DATA          followed by the raw bytes, block after block: as many as were asked for
    O  TRAILER       whether the generations still stood after the last byte, and checksums; or
    O  REFUSED       instead of DATA
    R  CHECK         answered by
    O  GENERATIONS   of these blocks now
    R  PAIR          bytes come another way from now on: see `process_group`

The owner answers in order; a reader may ask ahead, up to MAX_AHEAD requests. Not covered: encryption, and
somebody who changes bytes on the way on purpose.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from typing import Annotated, Final, get_args

import msgspec
from msgspec import Meta

from workers.framing import FrameProtocol, FrameReader
from workers.transfer.layout import KVLayout

PROTOCOL_VERSION: Final = 1
NONCE_BYTES: Final = 32
PROOF_BYTES: Final = 32
MAX_READ_BLOCKS: Final = 256
MAX_AHEAD: Final = 4  # requests that wait for their answer
MAX_GREETING_BYTES: Final = 4 << 10
MAX_FRAME_BYTES: Final = 32 << 10

_Block = Annotated[int, Meta(ge=0, lt=1 << 31)]
_Count = Annotated[int, Meta(ge=0, lt=1 << 62)]
_Number = Annotated[int, Meta(ge=0, lt=1 << 32)]
_Nonce = Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
_Blocks = Annotated[tuple[_Block, ...], Meta(min_length=1, max_length=MAX_READ_BLOCKS)]
_Counts = Annotated[tuple[_Count, ...], Meta(max_length=MAX_READ_BLOCKS)]
_Text = Annotated[str, Meta(max_length=500)]


class MessageError(Exception):
    """Bytes that are not what the protocol says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFacts:
    """Where the owner's host memory lies, for a reader on the same machine."""

    machine: _Text  # equal for processes that may share memory: `runtime.agreement.machine_id`
    pid: Annotated[int, Meta(gt=0, lt=1 << 31)]
    pool_address: _Count
    generations_address: _Count  # int64 each; 0 for ranks above 0
    proof_address: _Count
    proof: _Nonce  # random bytes that lie at proof_address of exactly this process


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerFacts:
    """What the owner is."""

    rank: Annotated[int, Meta(ge=0, lt=1 << 16)]
    layout: KVLayout
    num_blocks: Annotated[int, Meta(gt=0, lt=1 << 31)]
    device: _Text  # cpu or cuda
    has_generations: bool  # rank 0
    transports: Annotated[tuple[_Text, ...], Meta(max_length=16)]
    memory: MemoryFacts | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Challenge:
    """First frame of the owner."""

    nonce: _Nonce
    version: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """First frame of the reader."""

    nonce: _Nonce
    mac: _Nonce


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """The reader is let in."""

    mac: _Nonce
    facts: PeerFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """Send these bytes of these blocks."""

    number: _Number
    blocks: _Blocks
    generations: _Counts  # of the blocks; empty: not compared
    offset: _Count  # bytes from the start of a block
    num_bytes: Annotated[int, Meta(gt=0, lt=1 << 40)]
    has_checksums: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """The bytes follow this frame."""

    number: _Number


@dataclass(frozen=True, slots=True, kw_only=True)
class Trailer:
    """Behind the bytes."""

    number: _Number
    is_current: bool  # the generations stood still
    checksums: _Counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Nothing will be sent for this request. `reason` is the value of a `Reason`."""

    number: _Number
    reason: _Text
    message: _Text


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Say which generation these blocks have."""

    number: _Number
    blocks: _Blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Generations:
    """In the order of the blocks that were asked for."""

    number: _Number
    generations: _Counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Meet me there, to send by a process group of the two of us."""

    host: _Text
    port: Annotated[int, Meta(gt=0, lt=1 << 16)]
    timeout_s: Annotated[float, Meta(gt=0, le=60)]


# A frame's kind is the place of its message here: new ones go to the end.
Message = Challenge | Hello | Welcome | Read | Data | Trailer | Refused | Check | Generations | Pair
PROTOCOL: Final[FrameProtocol[Message]] = FrameProtocol(get_args(Message), MessageError)


def encode(message: Message) -> bytes:
    """The frame of a message."""
    return PROTOCOL.encode(message, MAX_FRAME_BYTES)


def frame_reader() -> FrameReader[Message]:
    """For one connection; its limit is to be raised once the peer is known."""
    return FrameReader(PROTOCOL, MAX_GREETING_BYTES)


def transfer_key(secret: bytes) -> bytes:
    """The key of these handshakes: no answer of another protocol with the same secret can be used here."""
    if not secret:
        raise ValueError("the application's secret is empty")
    return hmac.digest(secret, b"tandem kv transfer 1", "sha256")


def hello_mac(key: bytes, owner_nonce: bytes, reader_nonce: bytes) -> bytes:
    """What a reader must know the secret to compute."""
    return hmac.digest(key, b"reader" + owner_nonce + reader_nonce, "sha256")


def welcome_mac(key: bytes, owner_nonce: bytes, reader_nonce: bytes, facts: PeerFacts) -> bytes:
    """What an owner must know the secret to compute."""
    return hmac.digest(key, b"owner " + owner_nonce + reader_nonce + msgspec.msgpack.encode(facts), "sha256")
