"""What every way of moving KV blocks has in common: the reader's side, and how it fails.

The reader pulls; the owner's engine takes no part. Every block has a generation that counts up whenever its
owner gives it to somebody new. A reader names the generation it wants, and generations are compared before
and after the bytes are read (a seqlock): unequal means that the bytes are void. The table of generations is
kept by rank 0 only. All ranks of a group run the same plans and rank 0 counts before a plan is sent, so a
generation that still stands when bytes of any rank have arrived says that they were right.

A failed read leaves unspecified bytes in the reader's blocks, which nobody may find by hash.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Protocol

from workers.transfer.layout import Piece
from workers.types import BlockRead


class Reason(Enum):
    """Why a transfer failed; stable, for counters and decisions."""

    UNREACHABLE = "unreachable"  # no connection, or the owner's process ended
    REFUSED = "refused"  # the owner says no: another layout, blocks that it does not have
    TIMEOUT = "timeout"  # no answer in time
    STALE = "stale"  # a block belongs to somebody else by now
    DAMAGED = "damaged"  # the bytes that came are not those that were sent
    PROTOCOL = "protocol"  # what came is no message of ours
    UNSUPPORTED = "unsupported"  # this transport does not work between the two
    CANCELLED = "cancelled"  # by ourselves
    FAULT = "fault"  # of our own code; the log has it


class TransferFailed(Exception):
    """Blocks did not come. The reader is of no more use after it."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(f"{reason.value}: {message}")
        self.reason = reason


class Reader(Protocol):
    """Reads blocks of one rank of another group. One thread uses it; any thread may `cancel`."""

    @property
    def name(self) -> str:
        """Of the transport."""

    def read(self, blocks: Sequence[BlockRead], pieces: Sequence[Piece]) -> None:
        """Copies the pieces, all of them of this peer, of every block; returns when all have arrived.

        Compares generations when the peer is rank 0; otherwise the caller compares them on a reader of
        rank 0, before and after. Raises TransferFailed; nothing is written into the pool after that.
        """

    def check(self, blocks: Sequence[BlockRead]) -> None:
        """Raises TransferFailed (STALE) unless all blocks have their generation now. Rank 0 only."""

    def cancel(self) -> None:
        """Makes `read` fail soon. Returns at once."""

    def close(self) -> None:
        """Gives back what the reader holds. Not during `read`."""
