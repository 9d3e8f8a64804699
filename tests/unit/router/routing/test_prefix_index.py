from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from router.routing.prefix_index import PrefixIndex
from workers.data_plane.cached_blocks import CachedBlocks
from workers.hashing import BlockHash, block_hashes
from workers.types import BlockEvent, BlockEventKind, GroupId

A, B = GroupId("a"), GroupId("b")
STORED, REMOVED = BlockEventKind.STORED, BlockEventKind.REMOVED
TTL_S = 2.0


def event(number: int, kind: BlockEventKind, hashes: Sequence[BlockHash] = ()) -> BlockEvent:
    return BlockEvent(number=number, kind=kind, block_hashes=tuple(hashes))


def chain(length: int, salt: str = "") -> list[BlockHash]:
    return block_hashes(range(length * 4), 4, salt)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def index_of_two() -> tuple[PrefixIndex, Clock]:
    clock = Clock()
    index = PrefixIndex(clock=clock, speculative_ttl_s=TTL_S)
    for group in (A, B):
        index.add_group(group, max_blocks=100)
        index.load_snapshot(group, 0, ())
    return index, clock


def test_leading_blocks_by_group() -> None:
    index, _ = index_of_two()
    blocks = chain(6)
    assert index.apply(A, [event(1, STORED, blocks[:4]), event(2, REMOVED, [blocks[2]])])
    assert index.apply(B, [event(1, STORED, blocks[1:])])
    assert index.match(blocks) == {A: 2, B: 0}
    assert index.match([]) == {A: 0, B: 0}
    assert index.apply(A, [event(3, REMOVED, blocks)])
    assert index.match(blocks) == {A: 0, B: 0}


def test_a_gap_makes_the_group_unusable_until_a_snapshot() -> None:
    index, _ = index_of_two()
    blocks = chain(4)
    assert index.apply(A, [event(1, STORED, blocks)])
    assert not index.apply(A, [event(3, STORED, chain(1, "other"))])
    assert not index.is_usable(A)
    assert index.match(blocks) == {A: 0, B: 0}
    assert not index.apply(A, [event(4, STORED, blocks)])
    index.load_snapshot(A, 9, blocks[:3])
    assert index.is_usable(A)
    assert index.apply(
        A, [event(9, REMOVED, blocks), event(10, REMOVED, [blocks[2]])]
    )  # 9 is in the snapshot
    assert index.match(blocks) == {A: 2, B: 0}
    assert index.is_usable(A)


def test_nothing_is_known_of_a_group_before_its_snapshot() -> None:
    index = PrefixIndex()
    index.add_group(A, max_blocks=10)
    assert not index.is_usable(A)
    assert not index.apply(A, [event(1, STORED, chain(2))])
    assert index.match(chain(2)) == {A: 0}
    index.load_snapshot(A, 1, chain(2))
    assert index.is_usable(A)
    index.add_group(A, max_blocks=10)  # a new epoch
    assert index.match(chain(2)) == {A: 0}
    index.drop_group(A)
    index.drop_group(A)
    assert index.match(chain(2)) == {}


def test_more_blocks_than_a_group_can_have_are_not_believed() -> None:
    index = PrefixIndex()
    index.add_group(A, max_blocks=3)
    index.load_snapshot(A, 1, chain(4))
    assert not index.is_usable(A)
    assert index.blocks(A) == frozenset()
    index.load_snapshot(A, 1, chain(3))
    assert index.is_usable(A)
    assert not index.apply(A, [event(2, STORED, chain(1, "x"))])
    assert not index.is_usable(A)
    assert index.blocks(A) == frozenset()


def test_a_burst_finds_blocks_that_are_only_expected() -> None:
    index, clock = index_of_two()
    blocks = chain(5)
    index.apply(A, [event(1, STORED, blocks[:2])])
    index.expect(A, blocks)
    index.expect(GroupId("unknown"), blocks)
    assert index.match(blocks) == {A: 5, B: 0}
    clock.now_s += TTL_S - 0.01
    index.expect(A, blocks[:4])
    clock.now_s += 0.02  # the first expectation is over, the second is not
    assert index.match(blocks) == {A: 4, B: 0}
    clock.now_s += TTL_S
    assert index.match(blocks) == {A: 2, B: 0}


def test_expectations_are_bounded() -> None:
    clock = Clock()
    index = PrefixIndex(clock=clock, max_speculative_blocks=10)
    index.add_group(A, max_blocks=100)
    first, second, third = chain(4, "1"), chain(4, "2"), chain(4, "3")
    for blocks in (first, second, third):
        index.expect(A, blocks)
    assert [index.match(blocks)[A] for blocks in (first, second, third)] == [0, 4, 4]
    index.expect(A, chain(11, "too long"))
    assert index.match(chain(11, "too long")) == {A: 0}


def test_matching_is_fast() -> None:
    index = PrefixIndex()
    blocks = chain(64)
    others = chain(10_000, "others")
    for number in range(8):
        group = GroupId(f"g{number}")
        index.add_group(group, max_blocks=20_000)
        index.load_snapshot(group, 1, [*others, *blocks])
        index.expect(group, blocks)
    times = []
    for _ in range(200):
        start = time.perf_counter()
        index.match(blocks)
        times.append(time.perf_counter() - start)
    assert min(times) < 200e-6  # 64 blocks over 8 groups; about 30 us on an idle machine


def test_the_server_side_set_invents_no_blocks_after_a_gap() -> None:
    known = CachedBlocks()
    blocks = chain(3)
    assert known.apply(
        [event(1, STORED, blocks[:2]), event(1, REMOVED, blocks), event(2, REMOVED, blocks[:1])]
    )
    assert known.parts(10) == [(blocks[1],)]
    assert not known.apply([event(4, STORED, blocks[2:])])
    assert (known.number, known.parts(10)) == (4, [(blocks[2],)])
    assert known.apply([event(5, REMOVED, blocks)])
    assert known.parts(10) == [()]


HASHES = [BlockHash(bytes([i]) * 16) for i in range(12)]
hash_lists = st.lists(st.sampled_from(HASHES), max_size=6)
groups = st.sampled_from([A, B])


class IndexMachine(RuleBasedStateMachine):
    """Against a model that keeps, per group, a list of what was said and works everything out anew."""

    @initialize()
    def start(self) -> None:
        self.index, self.clock = index_of_two()
        self.truth: dict[GroupId, set[BlockHash]] = {A: set(), B: set()}
        self.numbers = {A: 0, B: 0}
        self.usable = {A: True, B: True}
        self.expected: list[tuple[GroupId, BlockHash, float]] = []

    @rule(group=groups, kind=st.sampled_from([STORED, STORED, REMOVED]), hashes=hash_lists)
    def next_event(self, group: GroupId, kind: BlockEventKind, hashes: list[BlockHash]) -> None:
        self._change(group, kind, hashes)
        assert self.index.apply(group, [event(self.numbers[group], kind, hashes)]) == self.usable[group]

    @rule(group=groups, hashes=hash_lists, missing=st.integers(1, 3))
    def event_after_a_gap(self, group: GroupId, hashes: list[BlockHash], missing: int) -> None:
        for _ in range(missing):  # events that the index never hears of
            self._change(group, STORED, hashes[:1])
        self._change(group, REMOVED, hashes)
        assert not self.index.apply(group, [event(self.numbers[group], REMOVED, hashes)])
        self.usable[group] = False

    @rule(group=groups, hashes=hash_lists)
    def old_event(self, group: GroupId, hashes: list[BlockHash]) -> None:
        if self.numbers[group]:
            assert self.index.apply(group, [event(1, REMOVED, hashes)]) == self.usable[group]

    @precondition(lambda self: not all(self.usable.values()))
    @rule()
    def snapshots(self) -> None:
        for group in (A, B):
            self.index.load_snapshot(group, self.numbers[group], self.truth[group])
            self.usable[group] = True

    @rule(group=groups, hashes=hash_lists)
    def dispatch(self, group: GroupId, hashes: list[BlockHash]) -> None:
        self.index.expect(group, hashes)
        self.expected += [(group, block, self.clock.now_s + TTL_S) for block in hashes]

    @rule(seconds=st.sampled_from([0.1, 0.9, 1.1, 3.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now_s += seconds

    @rule(prompt=st.lists(st.sampled_from(HASHES), max_size=8))
    def match(self, prompt: list[BlockHash]) -> None:
        found = {}
        for group in (A, B):
            there = set(self.truth[group]) if self.usable[group] else set()
            there |= {
                block for owner, block, end in self.expected if owner == group and end > self.clock.now_s
            }
            found[group] = next((i for i, block in enumerate(prompt) if block not in there), len(prompt))
        assert self.index.match(prompt) == found

    @invariant()
    def exact_part_is_the_truth(self) -> None:
        for group in (A, B):
            assert self.index.is_usable(group) == self.usable[group]
            if self.usable[group]:
                assert self.index.blocks(group) == self.truth[group]
                assert self.index.number(group) == self.numbers[group]

    def _change(self, group: GroupId, kind: BlockEventKind, hashes: list[BlockHash]) -> None:
        self.numbers[group] += 1
        if kind is STORED:
            self.truth[group] |= set(hashes)
        else:
            self.truth[group] -= set(hashes)


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_unknown_groups_are_a_bug_of_the_caller() -> None:
    with pytest.raises(KeyError):
        PrefixIndex().apply(A, [])
