"""Which group has which block cached: exact, from each group's own numbered log.

Per group: a set of block hashes as of event `number`, started from a snapshot and kept by strictly
consecutive events. After a gap nothing of it can be trusted, so the group counts as empty until the next
snapshot. On top, for `speculative_ttl_s` after a dispatch, the blocks that the request is about to make are
taken as there, so that a burst of equal prompts stays together although no event has come yet.

Beside each group's own set there is, for each block, the set of groups that have it, as the bits of a number:
a chain is walked once for all groups, whatever their number, and the groups that are still in it are an AND
away.

Bounded: a group cannot have more blocks than it said it has, and speculative entries are capped.
Every router replica that follows the same groups comes to the same index.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from workers.hashing import BlockHash
from workers.types import BlockEvent, BlockEventKind, GroupId


class _Expectation(NamedTuple):
    """Blocks of one dispatched request."""

    expires_s: float
    block_hashes: tuple[BlockHash, ...]


class _Holders:
    """Groups by block: bit n stands for the group in slot n."""

    def __init__(self) -> None:
        self.masks: dict[BlockHash, int] = {}

    def add(self, block_hash: BlockHash, bit: int) -> None:
        held = self.masks.get(block_hash)
        self.masks[block_hash] = bit if held is None else held | bit  # most have one holder: no new number

    def remove(self, block_hash: BlockHash, bit: int) -> None:
        """The group is known to have it."""
        held = self.masks[block_hash] & ~bit
        if held:
            self.masks[block_hash] = held
        else:
            del self.masks[block_hash]


class _GroupBlocks:
    """What is known of one group."""

    def __init__(self, slot: int, max_blocks: int, exact: _Holders, speculative: _Holders) -> None:
        self.slot = slot
        self.max_blocks = max_blocks
        self.number = 0
        self.is_usable = False  # False until a snapshot, and again after a gap
        self.exact: set[BlockHash] = set()
        self.speculative: dict[BlockHash, float] = {}  # to the time at which the last expectation ends
        self.expectations: deque[_Expectation] = deque()  # oldest first
        self.num_expected = 0  # hashes in `expectations`
        self._bit = 1 << slot
        self._exact_holders = exact
        self._speculative_holders = speculative

    def store(self, block_hashes: Iterable[BlockHash]) -> None:
        exact, add, bit = self.exact, self._exact_holders.add, self._bit
        for block_hash in block_hashes:
            if block_hash not in exact:
                exact.add(block_hash)
                add(block_hash, bit)

    def remove(self, block_hashes: Iterable[BlockHash]) -> None:
        exact, remove, bit = self.exact, self._exact_holders.remove, self._bit
        for block_hash in block_hashes:
            if block_hash in exact:
                exact.remove(block_hash)
                remove(block_hash, bit)

    def invalidate(self) -> None:
        self.is_usable = False
        self.remove(list(self.exact))

    def expect(self, block_hashes: Sequence[BlockHash], expires_s: float) -> None:
        self.expectations.append(_Expectation(expires_s, tuple(block_hashes)))
        self.num_expected += len(block_hashes)
        speculative, add, bit = self.speculative, self._speculative_holders.add, self._bit
        for block_hash in block_hashes:
            if block_hash not in speculative:
                add(block_hash, bit)
            speculative[block_hash] = expires_s

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
                    self._speculative_holders.remove(block_hash, self._bit)

    def clear(self) -> None:
        """The group is gone: its slot may be given to another."""
        self.invalidate()
        self.expire(float("inf"), 0)


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
        self._slots: list[GroupId | None] = []
        self._exact = _Holders()
        self._speculative = _Holders()
        # Who is to be looked at when: all expectations last equally long, so the first one ends first.
        self._endings: deque[tuple[float, _GroupBlocks]] = deque()
        self.num_stored = 0  # log entries that were applied
        self.num_removed = 0
        self.num_gaps = 0  # times that an entry was missing

    @property
    def num_blocks(self) -> int:
        """Of all groups, as their logs say."""
        return sum(len(blocks.exact) for blocks in self._groups.values())

    def add_group(self, group_id: GroupId, max_blocks: int) -> None:
        """A group, or a new epoch of it, about which nothing is known yet."""
        self.drop_group(group_id)
        slot = self._slots.index(None) if None in self._slots else len(self._slots)
        self._slots[slot : slot + 1] = [group_id]
        self._groups[group_id] = _GroupBlocks(slot, max_blocks, self._exact, self._speculative)

    def drop_group(self, group_id: GroupId) -> None:
        """Forgets a group; unknown ones are ignored."""
        blocks = self._groups.pop(group_id, None)
        if blocks is not None:
            blocks.clear()
            self._slots[blocks.slot] = None

    def load_snapshot(self, group_id: GroupId, number: int, block_hashes: Iterable[BlockHash]) -> None:
        """The group's blocks after event `number`: of more than the group can have, none is believed."""
        blocks = self._groups[group_id]
        blocks.invalidate()
        blocks.store(block_hashes)
        blocks.number = number
        blocks.is_usable = len(blocks.exact) <= blocks.max_blocks
        if not blocks.is_usable:
            blocks.invalidate()

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
                self.num_gaps += 1
                blocks.invalidate()
                return False
            blocks.number = event.number
            if event.kind is BlockEventKind.STORED:
                self.num_stored += 1
                blocks.store(event.block_hashes)
                if len(blocks.exact) > blocks.max_blocks:
                    blocks.invalidate()
                    return False
            else:
                self.num_removed += 1
                blocks.remove(event.block_hashes)
        return True

    def expect(self, group_id: GroupId, block_hashes: Sequence[BlockHash]) -> None:
        """A request with these blocks has just been sent to the group."""
        blocks = self._groups.get(group_id)
        if blocks is None or not block_hashes:
            return
        now_s = self._clock()
        expires_s = now_s + self._speculative_ttl_s
        blocks.expect(block_hashes, expires_s)
        self._endings.append((expires_s, blocks))
        self._expire(now_s)
        blocks.expire(now_s, self._max_speculative_blocks)

    def match(self, block_hashes: Sequence[BlockHash]) -> dict[GroupId, int]:
        """For every group, how many leading blocks of the chain it has or is about to have."""
        self._expire(self._clock())
        return self._leading(block_hashes, self._speculative.masks)

    def match_exact(self, block_hashes: Sequence[BlockHash]) -> dict[GroupId, int]:
        """For every group, how many leading blocks of the chain it has said that it has."""
        return self._leading(block_hashes, {})

    def is_usable(self, group_id: GroupId) -> bool:
        """Whether the exact part of the group is known, up to its last event."""
        blocks = self._groups.get(group_id)
        return blocks is not None and blocks.is_usable

    def number(self, group_id: GroupId) -> int:
        """Last event of the group that is applied."""
        return self._groups[group_id].number

    def blocks(self, group_id: GroupId) -> frozenset[BlockHash]:
        """A copy of the exact part, for tests."""
        return frozenset(self._groups[group_id].exact)

    def _expire(self, now_s: float) -> None:
        while self._endings and self._endings[0][0] <= now_s:
            _, blocks = self._endings.popleft()
            blocks.expire(now_s, self._max_speculative_blocks)

    def _leading(
        self, block_hashes: Sequence[BlockHash], further: Mapping[BlockHash, int]
    ) -> dict[GroupId, int]:
        """Leading blocks by group; `further` are holders beside those that are sure."""
        found = dict.fromkeys(self._groups, 0)
        exact = self._exact.masks
        left = (1 << len(self._slots)) - 1
        depth = 0
        for block_hash in block_hashes:
            still = left & (exact.get(block_hash, 0) | further.get(block_hash, 0))
            if still != left:
                if depth:
                    self._note(found, left ^ still, depth)
                left = still
                if not left:
                    return found
            depth += 1
        if depth:
            self._note(found, left, depth)
        return found

    def _note(self, found: dict[GroupId, int], mask: int, depth: int) -> None:
        """The groups of these slots have `depth` leading blocks."""
        bits = bin(mask)[:1:-1]  # slot 0 first
        slot = bits.find("1")
        while slot >= 0:
            group_id = self._slots[slot]
            if group_id is not None:
                found[group_id] = depth
            slot = bits.find("1", slot + 1)
