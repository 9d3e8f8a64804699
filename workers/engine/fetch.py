"""One fetch of blocks from another group, and who carries it out; see `workers.engine.fetch_table`."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Protocol

from workers.engine.sequence import Sequence as TokenSequence
from workers.hashing import BlockHash
from workers.types import BlockRead, KVSource


class KVPeers(Protocol):
    """Talks to other groups and moves bytes. All calls return at once; the answers are commands of
    `workers.engine.exchange`. Whatever fails is answered too."""

    def open(self, fetch_id: int, source: KVSource, hashes: Sequence[BlockHash]) -> None:
        """Ask the source for a lease on these blocks, and renew it. Answered by Offered or SourceLost."""
        ...

    def pull(self, fetch_id: int, pull_id: int, blocks: Sequence[BlockRead]) -> None:
        """Copy blocks, on all ranks. Answered by one Pulled, when nothing will be written any more."""
        ...

    def close(self, fetch_id: int) -> None:
        """The lease is not needed any more. Not answered; pulls under way are, as ever."""
        ...


class FetchEnd(Enum):
    """Why a fetch was over."""

    DONE = "done"
    INCOMPLETE = "incomplete"  # the source had fewer blocks
    LOST = "lost"  # no connection to the source, or it refused
    STALLED = "stalled"  # no progress for too long
    VOID = "void"  # blocks changed or broke on the way, or offers made no sense
    NO_MEMORY = "no_memory"  # given up for requests that run
    DROPPED = "dropped"  # not wanted any more


class FetchState(Enum):
    """Where a fetch is."""

    WANTED = "wanted"
    OPEN = "open"
    OVER = "over"


class Fetch:
    """What one request reads from one source."""

    __slots__ = (
        "expected_blocks",
        "held",
        "id",
        "num_arrived",
        "num_in_flight",
        "num_offered",
        "opened_s",
        "progress_s",
        "sequence",
        "source",
        "source_is_done",
        "state",
        "wanted",
    )

    def __init__(self, sequence: TokenSequence, source: KVSource) -> None:
        self.sequence = sequence  # first choice of the request
        self.source = source
        self.state = FetchState.WANTED
        self.id = 0  # from its start
        self.wanted: tuple[BlockHash, ...] = ()  # in the order of the chain
        self.held: list[int] = []  # blocks of the prompt that were here, and those that have arrived
        self.num_offered = 0
        self.num_arrived = 0
        self.num_in_flight = 0  # blocks
        self.source_is_done = False  # no further offers
        self.expected_blocks = 0  # of the sequence at its end
        self.opened_s = self.progress_s = 0.0
