"""How the ranks of a group find each other and prove that they belong together.

Rank 0 opens two ports on one address: the store of torch.distributed, and the control port. It hands the
`Rendezvous` with a random token to whoever starts the followers. A follower connects to the control port,
receives a nonce, and answers with HMAC-SHA256(token, nonce, rank, pid). Without the right answer the
connection is dropped and rank 0 goes on waiting. Facts of the ranks are then exchanged as JSON objects.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass

from workers.runtime.frames import FrameKind, FrameSocket, PeerClosed, PeerSilent, ProtocolError

_NONCE_BYTES = 32
_HELLO = struct.Struct("<ii32s")  # rank, pid, HMAC
_HANDSHAKE_TIMEOUT_S = 2.0
_MAX_FACTS_BYTES = 1 << 16

Facts = Mapping[str, str | int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Where the ranks of one group meet. The token is a secret: pass it by argument of a call or a pipe."""

    host: str
    store_port: int
    control_port: int
    token: str


def new_token() -> str:
    """A secret for one start of one group."""
    return secrets.token_hex(32)


def welcome(
    connection: socket.socket, token: str, *, timeout_s: float = _HANDSHAKE_TIMEOUT_S
) -> tuple[FrameSocket, int, int] | None:
    """Rank 0's side: (socket, rank, pid) of an authenticated follower, or None; then it is closed."""
    frames = FrameSocket(connection, timeout_s=timeout_s)
    try:
        nonce = secrets.token_bytes(_NONCE_BYTES)
        frames.send(FrameKind.CHALLENGE, nonce)
        kind, body = frames.receive_greeting(timeout_s, _HELLO.size)
        if kind is FrameKind.HELLO and len(body) == _HELLO.size:
            rank, pid, signature = _HELLO.unpack(body)
            if hmac.compare_digest(signature, _sign(token, nonce, rank, pid)):
                return frames, rank, pid
    except (PeerClosed, PeerSilent, ProtocolError):
        pass  # an unknown peer that leaves, stalls or talks nonsense is no matter of ours
    frames.close()
    return None


def join(rendezvous: Rendezvous, rank: int, *, timeout_s: float) -> FrameSocket:
    """A follower's side: connects, retrying until rank 0 listens, and introduces itself.

    Raises PeerSilent when rank 0 cannot be reached in time, PeerClosed when it ends or refuses.
    """
    deadline = time.monotonic() + timeout_s
    address = (rendezvous.host, rendezvous.control_port)
    while True:
        try:
            connection = socket.create_connection(address, timeout=_HANDSHAKE_TIMEOUT_S)
            break
        except OSError as error:
            if time.monotonic() >= deadline:
                raise PeerSilent(
                    f"rank 0 at {address[0]}:{address[1]} cannot be reached within {timeout_s:g} s: {error}"
                ) from error
            time.sleep(0.05)
    frames = FrameSocket(connection, timeout_s=timeout_s)
    kind, nonce = frames.receive_greeting(timeout_s, _NONCE_BYTES)
    if kind is not FrameKind.CHALLENGE:
        raise ProtocolError(f"expected a challenge from rank 0, got {kind.name}")
    pid = os.getpid()
    frames.send(FrameKind.HELLO, _HELLO.pack(rank, pid, _sign(rendezvous.token, nonce, rank, pid)))
    return frames


def pack_facts(facts: Facts) -> bytes:
    return json.dumps(dict(facts), sort_keys=True).encode()


def unpack_facts(body: bytes) -> dict[str, str | int]:
    """Raises ProtocolError unless body is a flat JSON object of strings and integers."""
    if len(body) > _MAX_FACTS_BYTES:
        raise ProtocolError(f"facts of {len(body)} bytes, the limit is {_MAX_FACTS_BYTES}")
    try:
        facts = json.loads(body)
    except ValueError as error:
        raise ProtocolError(f"facts are not JSON: {error}") from error
    if not isinstance(facts, dict) or not all(type(value) in (str, int) for value in facts.values()):
        raise ProtocolError("facts are not a flat object of strings and integers")
    return facts


def _sign(token: str, nonce: bytes, rank: int, pid: int) -> bytes:
    return hmac.digest(token.encode(), nonce + struct.pack("<ii", rank, pid), "sha256")
