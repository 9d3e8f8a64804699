"""Frames between a group's rank 0 and its clients: router replicas, which read tokens, the group's front,
which hands requests in, and other groups, which read KV blocks.

Frames are those of `workers.framing`. Life of a connection (C client, S server):

    S  CHALLENGE   nonce of the server, protocol version
    C  HELLO       who it is, its own nonce, HMAC over both nonces with the application's secret
    S  WELCOME     what the group is, HMAC of the server: both sides have shown that they know the secret
    S  SNAPSHOT    (subscribers) hashes of all cached blocks as of event `number`, in parts; then
    S  EVENTS      strictly consecutive from number + 1; a client that sees a gap sends RESYNC
    S  STATS       after steps, and with every PING
    C  SUBMIT      a request whose tokens go to connection `client_id`: answered by ACCEPTED or REFUSED
    S  CHUNKS      all tokens of one step for this client, in one frame
    C  ABORT       the request is not wanted any more
    C  REDIRECT    read what is missing of the prompt's blocks from another group, or compute it
    C  OPEN_LEASE, RENEW_LEASES, CLOSE_LEASE: keep these blocks for me to read; see `lease_server`
    S  KV_POOL     before the first answer to a lease: how blocks lie, and who gives out their bytes
    S  LEASE_OFFER further blocks of a lease, in the order that was asked for; or LEASE_REFUSED
    S  PING, C PONG; either side drops a peer that has been silent for too long
    S  GOODBYE     why the server closes

Whatever does not fit is a `WireError`, and the connection is dropped. Not covered: encryption; across
machines that one cannot trust, tunnel it.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from hashlib import sha256
from typing import Annotated, Final, get_args

from msgspec import Meta

from workers.framing import FrameProtocol, FrameReader
from workers.hashing import HASH_BYTES, BlockHash
from workers.report import GroupReport
from workers.types import BlockEvent, GenerateRequest, GroupInfo, GroupStats, KVSource, RequestId, TokenChunk

PROTOCOL_VERSION: Final = 3
NONCE_BYTES: Final = 32
MAX_FRAME_BYTES: Final = 32 << 20  # length field of a frame: prompt log-probabilities are the largest
MAX_GREETING_BYTES: Final = 4 << 10  # until a peer has shown that it knows the secret

MAX_LEASE_BLOCKS: Final = 65_536  # hashes in one lease: a million tokens

_LeaseNumber = Annotated[int, Meta(ge=0, lt=1 << 62)]
_LeaseHash = Annotated[BlockHash, Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]
_Block = Annotated[int, Meta(ge=0, lt=1 << 31)]
_Generation = Annotated[int, Meta(ge=0, lt=1 << 62)]
_Port = Annotated[int, Meta(ge=1, le=65_535)]
_Text = Annotated[str, Meta(max_length=500)]


class WireError(Exception):
    """Bytes that are not what the protocol says, or a message that does not fit into a frame."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Challenge:
    """First frame of the server."""

    nonce: bytes
    version: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """First frame of the client."""

    client_id: str
    nonce: bytes
    mac: bytes  # see `hello_mac`
    subscribes: bool  # wants SNAPSHOT and EVENTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """The client is let in."""

    info: GroupInfo
    mac: bytes  # see `welcome_mac`


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Part of the set of cached block hashes after event `number`."""

    number: int
    block_hashes: tuple[BlockHash, ...]
    is_last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Events:
    """Entries of the block log, consecutive."""

    events: tuple[BlockEvent, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Load of the group now; with heartbeats also what it has counted."""

    stats: GroupStats
    report: GroupReport | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunks:
    """What one step made for the requests of this client."""

    chunks: tuple[TokenChunk, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """Run this request; its tokens go to the connection of `client_id`."""

    client_id: str
    request: GenerateRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """The engine has the request."""

    request_id: RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The engine does not have the request, and will not."""

    request_id: RequestId
    code: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """End this request and free what it holds."""

    request_id: RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class Redirect:
    """The source of this request's KV blocks has failed."""

    request_id: RequestId
    source: KVSource | None  # None: compute what is missing


@dataclass(frozen=True, slots=True, kw_only=True)
class Ping:
    """Are you there?"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pong:
    """Yes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodbye:
    """The server closes the connection."""

    reason: str
    is_planned: bool = False  # the group was told to end; nothing is wrong with it


@dataclass(frozen=True, slots=True, kw_only=True)
class Resync:
    """The client has missed events: send a snapshot again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenLease:
    """Offer me these blocks, in this order, and keep them until I have read them."""

    number: _LeaseNumber  # of the client's choice, each once a connection
    hashes: Annotated[tuple[_LeaseHash, ...], Meta(min_length=1, max_length=MAX_LEASE_BLOCKS)]
    transfer_id: Annotated[str, Meta(max_length=64)] | None  # of the request that computes them just now


@dataclass(frozen=True, slots=True, kw_only=True)
class RenewLeases:
    """I still want these."""

    numbers: Annotated[tuple[_LeaseNumber, ...], Meta(max_length=4096)]


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseLease:
    """I have read, or do not want to any more."""

    number: _LeaseNumber


@dataclass(frozen=True, slots=True, kw_only=True)
class KVPool:
    """How the group's KV blocks lie, and where its ranks, in their order, give out their bytes."""

    layout: Annotated[dict[_Text, int | _Text], Meta(max_length=32)]  # see `workers.transfer.layout`
    endpoints: Annotated[tuple[tuple[_Text, _Port], ...], Meta(min_length=1, max_length=1024)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseOffer:
    """Blocks that the reader may read now: those of the hashes from `first` on."""

    number: _LeaseNumber
    first: Annotated[int, Meta(ge=0, lt=MAX_LEASE_BLOCKS)]
    blocks: Annotated[tuple[_Block, ...], Meta(max_length=MAX_LEASE_BLOCKS)]
    generations: Annotated[tuple[_Generation, ...], Meta(max_length=MAX_LEASE_BLOCKS)]  # one a block
    is_complete: bool  # no further block will come


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRefused:
    """There is no such lease, and why."""

    number: _LeaseNumber
    reason: _Text


# A frame's kind is the place of its message here: new ones go to the end.
Message = (
    Challenge | Hello | Welcome | Snapshot | Events | Stats | Chunks | Submit | Accepted | Refused | Abort
    | Ping | Pong | Goodbye | Resync | Redirect | OpenLease | RenewLeases | CloseLease | KVPool | LeaseOffer
    | LeaseRefused
)  # fmt: skip
PROTOCOL: Final[FrameProtocol[Message]] = FrameProtocol(get_args(Message), WireError)


def encode(message: Message, max_frame_bytes: int = MAX_FRAME_BYTES) -> bytes:
    """The frame of a message. Raises WireError when it cannot be written or is too large."""
    return PROTOCOL.encode(message, max_frame_bytes)


def frame_reader(max_frame_bytes: int) -> FrameReader[Message]:
    """For one connection. Raises WireError at the first frame that is larger, or malformed."""
    return FrameReader(PROTOCOL, max_frame_bytes)


def hello_mac(secret: bytes, server_nonce: bytes, client_nonce: bytes, client_id: str) -> bytes:
    """What a client must know the secret to compute."""
    return _mac(secret, b"tandem client", server_nonce, client_nonce, client_id.encode())


def welcome_mac(secret: bytes, server_nonce: bytes, client_nonce: bytes, client_id: str) -> bytes:
    """What a server must know the secret to compute."""
    return _mac(secret, b"tandem server", server_nonce, client_nonce, client_id.encode())


def _mac(secret: bytes, *parts: bytes) -> bytes:
    if not secret:
        raise ValueError("the application's secret is empty")
    digest = hmac.new(secret, digestmod=sha256)
    for part in parts:  # length before content, so that no two lists of parts give the same bytes
        digest.update(len(part).to_bytes(4, "little") + part)
    return digest.digest()
