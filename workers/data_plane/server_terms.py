"""What a StreamServer is told, and what it asks of the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from workers.data_plane.channel import MAX_OUTGOING_BYTES
from workers.types import GenerateRequest, RequestId


class EngineInput(Protocol):
    """Where requests go in. Both calls are thread-safe and return at once."""

    def submit(self, request: GenerateRequest) -> None:
        """Refusals come back as ERROR chunks."""
        ...

    def abort(self, request_id: RequestId) -> None:
        """Unknown ids are ignored."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """Times and sizes of a StreamServer."""

    heartbeat_s: float = 1.0  # PING and STATS at least this often
    dead_after_s: float = 10.0  # a client silent for longer is dropped
    greeting_timeout_s: float = 5.0  # from connect to a valid HELLO
    stats_period_s: float = 0.05  # STATS at most this often
    max_outgoing_bytes: int = MAX_OUTGOING_BYTES  # waiting for one client
    max_clients: int = 1024
    snapshot_part_blocks: int = 65_536  # hashes in one SNAPSHOT frame
    max_remembered_aborts: int = 4096  # aborts that came before their SUBMIT
