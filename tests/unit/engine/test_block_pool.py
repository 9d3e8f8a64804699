"""Block pool: exact block ids, eviction order and events; all invariants under random operations."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.unit.engine.toy import replay
from workers.engine.block_pool import BlockPool
from workers.hashing import BlockHash
from workers.types import BlockEvent, BlockEventKind


def _hash(name: str) -> BlockHash:
    return BlockHash(name.encode().ljust(16, b"."))


def _sealed_table(pool: BlockPool, names: str) -> list[int]:
    table = []
    for name in names:
        table.append(pool.allocate())
        assert pool.seal(table[-1], _hash(name))
    return table


def _events(pool: BlockPool) -> list[tuple[int, str, list[str]]]:
    return [
        (
            event.number,
            event.kind.value,
            [block_hash.decode().rstrip(".") for block_hash in event.block_hashes],
        )
        for event in pool.take_events()
    ]


def test_gives_unused_blocks_in_order_before_it_evicts() -> None:
    pool = BlockPool(4)
    table = _sealed_table(pool, "ab")
    pool.free_table(table)
    assert (pool.num_unused, pool.num_evictable, pool.num_active, pool.num_available) == (2, 2, 0, 4)
    assert [pool.allocate() for _ in range(2)] == [2, 3]
    assert pool.cached_hashes() == {_hash("a"), _hash("b")}
    pool.check_integrity([[2, 3]])


def test_evicts_least_recently_freed_first_and_chains_from_their_end() -> None:
    pool = BlockPool(6)
    first = _sealed_table(pool, "abc")  # blocks 0, 1, 2
    second = _sealed_table(pool, "xyz")  # blocks 3, 4, 5
    pool.free_table(first)
    pool.free_table(second)
    assert [pool.allocate() for _ in range(6)] == [2, 1, 0, 5, 4, 3]
    assert _events(pool) == [(1, "stored", ["a", "b", "c", "x", "y", "z"]), (2, "removed", list("cbazyx"))]


def test_a_shared_block_leaves_the_eviction_order_and_comes_back_last() -> None:
    pool = BlockPool(3)
    table = _sealed_table(pool, "abc")
    pool.free_table(table)  # order of eviction: 2, 1, 0
    found = pool.find(_hash("c"))
    assert found == 2
    pool.share(found)
    assert pool.num_active == 1
    pool.free(found)
    assert [pool.allocate() for _ in range(3)] == [1, 0, 2]


def test_a_block_is_free_only_when_its_last_owner_has_gone() -> None:
    pool = BlockPool(2)
    (block,) = _sealed_table(pool, "a")
    pool.share(block)
    pool.free(block)
    assert (pool.num_owners(block), pool.num_active, pool.num_evictable) == (1, 1, 0)
    pool.check_integrity([[block]])
    pool.free(block)
    assert (pool.num_active, pool.num_evictable, pool.num_unused) == (0, 1, 1)


def test_a_duplicate_stays_unhashed_until_its_owner_frees_it() -> None:
    pool = BlockPool(2)
    original, duplicate = pool.allocate(), pool.allocate()
    assert pool.seal(original, _hash("a"))
    assert not pool.seal(duplicate, _hash("a"))
    assert pool.find(_hash("a")) == original
    pool.free(duplicate)
    assert (pool.num_unused, pool.num_evictable) == (1, 0)
    assert _events(pool) == [(1, "stored", ["a"])]


def test_a_spoiled_block_cannot_be_found_and_goes_unused_to_be_zeroed() -> None:
    pool = BlockPool(3)
    table = _sealed_table(pool, "ab")
    pool.free(table[0])
    pool.spoil(table[0])  # evictable: at once unused
    pool.spoil(table[1])  # active: stays with its owner
    pool.spoil(table[1])  # nothing left to do but to count
    pool.check_integrity([[table[1]]])
    assert pool.cached_hashes() == frozenset()
    pool.free(table[1])
    assert (pool.num_unused, pool.num_evictable) == (3, 0)
    assert _events(pool) == [(1, "stored", ["a", "b"]), (2, "removed", ["a", "b"])]


def test_events_are_numbered_consecutively_over_all_takes() -> None:
    pool = BlockPool(1)
    for name in "abc":
        block = pool.allocate()
        pool.seal(block, _hash(name))
        pool.free(block)
    assert _events(pool) == [
        (1, "stored", ["a"]),
        (2, "removed", ["a"]),
        (3, "stored", ["b"]),
        (4, "removed", ["b"]),
        (5, "stored", ["c"]),
    ]
    assert _events(pool) == []
    pool.allocate()
    assert pool.take_events() == [
        BlockEvent(number=6, kind=BlockEventKind.REMOVED, block_hashes=(_hash("c"),))
    ]


def test_refuses_what_would_break_it() -> None:
    with pytest.raises(ValueError, match="a KV pool of 0 blocks holds nothing"):
        BlockPool(0)
    pool = BlockPool(1)
    with pytest.raises(AssertionError, match="block 0 freed without an owner"):
        pool.free(0)
    with pytest.raises(AssertionError, match="no owner and no hash to share"):
        pool.share(0)
    with pytest.raises(AssertionError, match="sealed without an owner"):
        pool.seal(0, _hash("a"))
    pool.seal(pool.allocate(), _hash("a"))
    with pytest.raises(AssertionError, match="block 0 sealed twice"):
        pool.seal(0, _hash("b"))
    with pytest.raises(AssertionError, match="all 1 blocks are active"):
        pool.allocate()


def test_check_integrity_sees_an_owner_that_the_pool_does_not_know() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    with pytest.raises(AssertionError, match="owners by table"):
        pool.check_integrity([[block], [block]])
    with pytest.raises(AssertionError, match="a block twice in one table"):
        pool.check_integrity([[block, block]])


def test_a_generation_counts_up_whenever_the_content_may_change() -> None:
    pool = BlockPool(2)
    table = _sealed_table(pool, "ab")
    assert memoryview(pool.generations).cast("B").cast("q").tolist() == [
        1,
        1,
    ]  # as a reader elsewhere sees it
    pool.free_table(table)
    pool.share(0)
    pool.free(0)
    assert list(pool.generations) == [1, 1]
    assert pool.allocate() == 1
    assert list(pool.generations) == [1, 2]
    pool.spoil(0)  # its values are not numbers
    assert list(pool.generations) == [2, 2]
    pool.free(1)
    assert sorted(pool.allocate() for _ in range(2)) == [0, 1]
    assert list(pool.generations) == [3, 3]


class PoolMachine(RuleBasedStateMachine):
    """Owners take, share, seal and free; the event log must always say what the index says."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(7)
        self.tables: list[list[int]] = []
        self.sealed: set[int] = set()  # blocks that their owner has offered
        self.spoiled: set[int] = set()  # with owners
        self.to_zero: set[int] = set()
        self.known: set[bytes] = set()
        self.next_number = 1

    @precondition(lambda self: self.pool.num_available > 0)
    @rule(new=st.booleans())
    def allocate(self, new: bool) -> None:
        if new or not self.tables:
            self.tables.append([])
        block = self.pool.allocate()
        self.sealed.discard(block)
        self.tables[-1].append(block)

    @precondition(lambda self: self.tables)
    @rule(name=st.sampled_from("abcdefgh"), pick=st.integers(0, 100))
    def seal(self, name: str, pick: int) -> None:
        table = self.tables[pick % len(self.tables)]
        block = table[pick % len(table)]
        if block not in self.sealed:
            was_known = self.pool.find(_hash(name)) is not None
            stored = self.pool.seal(block, _hash(name))
            assert stored == (not was_known and block not in self.spoiled)
            if stored:
                self.sealed.add(block)

    @rule(name=st.sampled_from("abcdefgh"))
    def share(self, name: str) -> None:
        block = self.pool.find(_hash(name))
        if block is not None:
            self.pool.share(block)
            self.sealed.add(block)
            self.tables.append([block])

    @precondition(lambda self: self.tables)
    @rule(pick=st.integers(0, 100))
    def free(self, pick: int) -> None:
        self.pool.free_table(self.tables.pop(pick % len(self.tables)))
        freed = {block for block in self.spoiled if self.pool.num_owners(block) == 0}
        self.spoiled -= freed
        self.to_zero |= freed

    @rule(block=st.integers(0, 6))
    def spoil(self, block: int) -> None:
        self.pool.spoil(block)
        self.sealed.discard(block)
        (self.spoiled if self.pool.num_owners(block) else self.to_zero).add(block)

    @rule()
    def take_zero_blocks(self) -> None:
        assert set(self.pool.take_zero_blocks()) == self.to_zero
        self.to_zero.clear()

    @precondition(lambda self: self.pool.num_available > 0)
    @rule()
    def allocate_to_overwrite(self) -> None:
        block = self.pool.allocate_to_overwrite()
        self.sealed.discard(block)
        self.to_zero.discard(block)
        self.tables.append([block])

    @rule()
    def read_events(self) -> None:
        for event in self.pool.take_events():
            assert event.number == self.next_number
            self.next_number += 1
            replay([event], self.known)
        assert self.known == self.pool.cached_hashes()

    @invariant()
    def holds(self) -> None:
        self.pool.check_integrity(self.tables)

    def teardown(self) -> None:
        for table in self.tables:
            self.pool.free_table(table)
        self.pool.check_integrity([])
        assert self.pool.num_available == 7


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
