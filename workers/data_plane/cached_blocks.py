"""The set of blocks that a group has cached, followed through its numbered event log."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from workers.hashing import BlockHash
from workers.types import BlockEvent, BlockEventKind


class CachedBlocks:
    """Block hashes after event `number`."""

    def __init__(self) -> None:
        self.number = 0
        self._hashes: set[BlockHash] = set()

    def apply(self, events: Iterable[BlockEvent]) -> bool:
        """Applies events in order. Events up to `number` are known already and skipped.

        False: events are missing. Then what was known before the gap is forgotten, since any of it may be
        gone, and the set goes on from the event after the gap: it lacks blocks but invents none.
        """
        is_whole = True
        for event in events:
            if event.number <= self.number:
                continue
            if event.number != self.number + 1:
                is_whole = False
                self._hashes.clear()
            self.number = event.number
            if event.kind is BlockEventKind.STORED:
                self._hashes.update(event.block_hashes)
            else:
                self._hashes.difference_update(event.block_hashes)
        return is_whole

    def parts(self, max_blocks: int) -> list[tuple[BlockHash, ...]]:
        """All hashes, in pieces of at most `max_blocks`; one empty piece when there are none."""
        rest = iter(self._hashes)
        pieces = []
        while piece := tuple(islice(rest, max_blocks)):
            pieces.append(piece)
        return pieces or [()]
