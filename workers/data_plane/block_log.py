"""A group's log of cached blocks as the frames that subscribers get: see `workers.data_plane.wire`."""

from __future__ import annotations

import logging

from workers.data_plane.cached_blocks import CachedBlocks
from workers.data_plane.wire import Events, Snapshot, encode
from workers.types import BlockEvent, GroupId

_log = logging.getLogger(__name__)


class BlockLog:
    """Follows the engine's events. Events and snapshots taken in order tell a subscriber all."""

    def __init__(self, group_id: GroupId, snapshot_part_blocks: int) -> None:
        """snapshot_part_blocks: hashes in one SNAPSHOT frame."""
        self._group_id = group_id
        self._part_blocks = snapshot_part_blocks
        self._blocks = CachedBlocks()

    def take(self, events: list[BlockEvent]) -> bytes:
        """Applies events; what subscribers get: the events, or everything anew when some are missing."""
        if not events:
            return b""
        if self._blocks.apply(events):
            return encode(Events(events=tuple(events)))
        _log.error("block log of %s has a gap at event %d", self._group_id, self._blocks.number)
        return self.snapshot()

    def snapshot(self) -> bytes:
        """All blocks that are cached now, in parts."""
        parts = self._blocks.parts(self._part_blocks)
        return b"".join(
            encode(Snapshot(number=self._blocks.number, block_hashes=part, is_last=i == len(parts) - 1))
            for i, part in enumerate(parts)
        )
