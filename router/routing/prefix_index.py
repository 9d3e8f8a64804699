"""Which group has which block cached: exact, from each group's own numbered log.

Per group: a set of block hashes as of event `number`, started from a snapshot and kept by strictly
consecutive events. After a gap nothing of it can be trusted, so the group counts as empty until the next
snapshot. On top, for `speculative_ttl_s` after a dispatch, the blocks that the request is about to make are
taken as there, so that a burst of equal prompts stays together although no event has come yet.

Bounded: a group cannot have more blocks than it said it has, and speculative entries are capped.
Every router replica that follows the same groups comes to the same index.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from workers.hashing import BlockHash
from workers.types import BlockEvent, BlockEventKind, GroupId


class _Expectation(NamedTuple):
    """Blocks of one dispatched request."""

    expires_s: float
    block_hashes: tuple[BlockHash, ...]


class _GroupBlocks:
    """What is known of one group."""

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self.number = 0
        self.is_usable = False  # False until a snapshot, and again after a gap
        self.exact: set[BlockHash] = set()
        self.speculative: dict[BlockHash, float] = {}  # to the time at which the last expectation ends
        self.expectations: deque[_Expectation] = deque()  # oldest first
        self.num_expected = 0  # hashes in `expectations`

    def invalidate(self) -> None:
        self.is_usable = False
        self.exact.clear()

    def expire(self, now_s: float, max_expected: int) -> None:
        """Drops expectations that are over, and the oldest ones above the limit."""
        while self.expectations and (
            self.expectations[0].expires_s <= now_s or self.num_expected > max_expected
        ):
            gone = self.expectations.popleft()
            self.num_expected -= len(gone.block_hashes)
            for block_hash in gone.block_hashes:
                if self.speculative.get(block_hash, float("inf")) <= gone.expires_s:
                    del self.speculative[block_hash]

    def num_leading(self, block_hashes: Sequence[BlockHash]) -> int:
        exact, speculative = self.exact, self.speculative
        count = 0
        for block_hash in block_hashes:
            if block_hash not in exact and block_hash not in speculative:
                break
            count += 1
        return count

    def num_leading_exact(self, block_hashes: Sequence[BlockHash]) -> int:
        exact = self.exact
        return next(
            (i for i, block_hash in enumerate(block_hashes) if block_hash not in exact), len(block_hashes)
        )


class PrefixIndex:
    """Cached blocks of all groups. Not thread-safe; lives on the router's event loop."""

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        speculative_ttl_s: float = 2.0,
        max_speculative_blocks: int = 65_536,  # per group
    ) -> None:
        self._clock = clock
        self._speculative_ttl_s = speculative_ttl_s
        self._max_speculative_blocks = max_speculative_blocks
        self._groups: dict[GroupId, _GroupBlocks] = {}

    def add_group(self, group_id: GroupId, max_blocks: int) -> None:
        """A group, or a new epoch of it, about which nothing is known yet."""
        self._groups[group_id] = _GroupBlocks(max_blocks)

    def drop_group(self, group_id: GroupId) -> None:
        """Forgets a group; unknown ones are ignored."""
        self._groups.pop(group_id, None)

    def load_snapshot(self, group_id: GroupId, number: int, block_hashes: Iterable[BlockHash]) -> bool:
        """The group's blocks after event `number`. False when there are more than the group can have."""
        blocks = self._groups[group_id]
        blocks.exact = set(block_hashes)
        blocks.number = number
        blocks.is_usable = len(blocks.exact) <= blocks.max_blocks
        if not blocks.is_usable:
            blocks.invalidate()
        return blocks.is_usable

    def apply(self, group_id: GroupId, events: Iterable[BlockEvent]) -> bool:
        """Applies events of a group in order; events that the snapshot includes are skipped.

        False: an event is missing or cannot be, so the group's blocks are unusable and a new snapshot is
        needed. Events that come before it are skipped and answered by False too.
        """
        blocks = self._groups[group_id]
        if not blocks.is_usable:
            return False
        for event in events:
            if event.number <= blocks.number:
                continue
            if event.number != blocks.number + 1:
                blocks.invalidate()
                return False
            blocks.number = event.number
            if event.kind is BlockEventKind.STORED:
                blocks.exact.update(event.block_hashes)
                if len(blocks.exact) > blocks.max_blocks:
                    blocks.invalidate()
                    return False
            else:
                blocks.exact.difference_update(event.block_hashes)
        return True

    def expect(self, group_id: GroupId, block_hashes: Sequence[BlockHash]) -> None:
        """A request with these blocks has just been sent to the group."""
        blocks = self._groups.get(group_id)
        if blocks is None or not block_hashes:
            return
        now_s = self._clock()
        expires_s = now_s + self._speculative_ttl_s
        blocks.expectations.append(_Expectation(expires_s, tuple(block_hashes)))
        blocks.num_expected += len(block_hashes)
        blocks.speculative.update(dict.fromkeys(block_hashes, expires_s))
        blocks.expire(now_s, self._max_speculative_blocks)

    def match(self, block_hashes: Sequence[BlockHash]) -> dict[GroupId, int]:
        """For every group, how many leading blocks of the chain it has or is about to have."""
        now_s = self._clock()
        found = {}
        for group_id, blocks in self._groups.items():
            if blocks.expectations:
                blocks.expire(now_s, self._max_speculative_blocks)
            found[group_id] = blocks.num_leading(block_hashes)
        return found

    def num_cached(self, group_id: GroupId, block_hashes: Sequence[BlockHash]) -> int:
        """How many leading blocks of the chain the group has said that it has."""
        blocks = self._groups.get(group_id)
        return blocks.num_leading_exact(block_hashes) if blocks is not None else 0

    def is_usable(self, group_id: GroupId) -> bool:
        """Whether the exact part of the group is known, up to its last event."""
        blocks = self._groups.get(group_id)
        return blocks is not None and blocks.is_usable

    def number(self, group_id: GroupId) -> int:
        """Last event of the group that is applied."""
        return self._groups[group_id].number

    def blocks(self, group_id: GroupId) -> frozenset[BlockHash]:
        """A copy of the exact part: for tests and for status pages."""
        return frozenset(self._groups[group_id].exact)
