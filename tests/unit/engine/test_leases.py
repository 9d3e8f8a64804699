"""Leases: exact offers, ends and holds, on a pool alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.engine.toy import make_engine, make_request, numbers, run
from workers.engine.block_pool import BlockPool
from workers.engine.exchange import CloseLease, OpenLease
from workers.engine.leases import LeaseId, LeaseTable, LeaseTerms
from workers.hashing import BlockHash, block_hashes
from workers.types import BlockOffer, RequestId, RequestRefused

LEASE, OTHER = LeaseId("D/1"), LeaseId("D/2")
TRANSFER = "0f" * 16


def _hashes(names: str) -> tuple[BlockHash, ...]:
    return tuple(BlockHash(name.encode().ljust(16, b".")) for name in names)


class Leases:
    """A table, its pool, its clock, and what readers were told: (lease, [(index, block)], is complete)."""

    def __init__(self, num_blocks: int = 8, terms: LeaseTerms | None = None) -> None:
        self.now_s = 100.0
        self.told: list[tuple[str, list[tuple[int, int]], bool]] = []
        self.pool = BlockPool(num_blocks)
        self.table = LeaseTable(
            pool=self.pool, on_offer=self._hear, clock=lambda: self.now_s, terms=terms or LeaseTerms()
        )

    def _hear(self, lease_id: LeaseId, offers: tuple[BlockOffer, ...], is_complete: bool) -> None:
        for offer in offers:
            assert offer.generation == self.pool.generations[offer.block]
        self.told.append((lease_id, [(offer.index, offer.block) for offer in offers], is_complete))

    def heard(self) -> list[tuple[str, list[tuple[int, int]], bool]]:
        told, self.told = self.told, []
        return told

    def cache(self, names: str) -> list[int]:
        """Computes, seals and frees blocks, as a request that ends."""
        table = [self.pool.allocate() for _ in names]
        for block, block_hash in zip(table, _hashes(names), strict=True):
            self.pool.seal(block, block_hash)
        self.pool.free_table(table)
        return table

    def check(self) -> None:
        self.table.check_integrity()
        self.pool.check_integrity(self.table.tables())


def test_cached_blocks_are_offered_and_pinned_until_the_lease_is_closed() -> None:
    leases = Leases(3)
    leases.cache("abc")
    leases.table.open(LEASE, _hashes("ab"), None)
    assert leases.heard() == [("D/1", [(0, 0), (1, 1)], True)]
    assert leases.pool.num_available == 1
    assert leases.pool.allocate() == 2
    leases.pool.free(2)
    leases.check()
    leases.table.close(LEASE)
    leases.table.close(LEASE)  # unknown by now
    assert leases.pool.num_available == 3
    assert [leases.pool.allocate() for _ in range(3)] == [2, 1, 0]  # the end of the chain goes first
    assert len(leases.table) == 0


def test_offers_end_before_the_first_block_that_is_not_there() -> None:
    leases = Leases()
    leases.cache("ac")
    leases.table.open(LEASE, _hashes("abc"), None)
    assert leases.heard() == [("D/1", [(0, 0)], True)]
    leases.cache("b")
    leases.table.look()
    assert leases.heard() == []  # it was complete


def test_blocks_are_offered_as_the_request_seals_them() -> None:
    leases = Leases()
    leases.cache("a")
    leases.table.request_came(TRANSFER)
    leases.table.open(LEASE, _hashes("abcd"), TRANSFER)
    assert leases.heard() == [("D/1", [(0, 0)], False)]
    leases.table.look()
    assert leases.heard() == []
    leases.cache("bc")
    leases.table.look()
    assert leases.heard() == [("D/1", [(1, 1), (2, 2)], False)]
    leases.table.request_ended(TRANSFER)
    leases.table.look()
    assert leases.heard() == [("D/1", [], True)]
    assert leases.table.num_growing == 0
    leases.check()


def test_a_lease_with_all_blocks_is_complete_before_its_request_ends() -> None:
    leases = Leases()
    leases.table.request_came(TRANSFER)
    leases.table.open(LEASE, _hashes("a"), TRANSFER)
    leases.cache("a")
    leases.table.look()
    assert leases.heard() == [("D/1", [(0, 0)], True)]


def test_the_last_blocks_come_with_the_end_of_their_request() -> None:
    leases = Leases()
    leases.table.request_came(TRANSFER)
    leases.table.open(LEASE, _hashes("ab"), TRANSFER)
    leases.cache("a")
    leases.table.request_ended(TRANSFER)  # in the step that sealed a
    leases.table.look()
    assert leases.heard() == [("D/1", [(0, 0)], True)]


@pytest.mark.parametrize("is_refused", [False, True])
def test_a_lease_that_comes_after_its_request_does_not_wait(is_refused: bool) -> None:
    leases = Leases()
    if is_refused:
        leases.table.request_refused(TRANSFER)
    else:
        leases.table.request_came(TRANSFER)
        leases.table.request_ended(TRANSFER)
    leases.table.open(LEASE, _hashes("a"), TRANSFER)
    assert leases.heard() == [("D/1", [], True)]


def test_a_request_that_does_not_come_is_waited_for_only_so_long() -> None:
    leases = Leases()
    leases.table.open(LEASE, _hashes("a"), TRANSFER)
    leases.now_s += 4.9
    assert not leases.table.sweep()
    assert leases.heard() == []
    leases.now_s += 0.2
    leases.table.sweep()
    assert leases.heard() == [("D/1", [], True)]


def test_a_request_that_has_come_may_take_its_time() -> None:
    leases = Leases()
    leases.table.open(LEASE, _hashes("a"), TRANSFER)
    leases.table.request_came(TRANSFER)
    for _ in range(5):
        leases.now_s += 9.0
        leases.table.renew(LEASE)
        assert not leases.table.sweep()
    assert leases.heard() == []


def test_leases_expire_in_any_order() -> None:
    leases = Leases()
    leases.cache("abc")
    names = [LeaseId(str(number)) for number in range(3)]
    for name, letter in zip(names, "abc", strict=True):
        leases.table.open(name, _hashes(letter), None)
    leases.now_s += 9.0
    leases.table.renew(names[0])
    leases.table.renew(LeaseId("unknown"))
    leases.now_s += 1.5
    leases.heard()
    assert leases.table.sweep()
    assert (len(leases.table), leases.table.expired_total) == (1, 2)
    assert leases.pool.num_active == 1
    assert leases.heard() == []  # they were complete: nothing to say
    leases.now_s += 10.0
    assert leases.table.sweep()
    assert leases.pool.num_active == 0


def test_the_youngest_lease_with_blocks_is_revoked_first_and_a_waiting_reader_hears_of_it() -> None:
    leases = Leases()
    leases.cache("ab")
    leases.table.open(LEASE, _hashes("a"), None)
    leases.table.request_came(TRANSFER)
    leases.table.open(OTHER, _hashes("bc"), TRANSFER)
    leases.table.open(LeaseId("D/3"), _hashes("c"), TRANSFER)  # has nothing yet
    leases.heard()
    assert leases.table.revoke_youngest()
    assert leases.heard() == [("D/2", [], True)]
    assert leases.table.revoke_youngest()
    assert leases.heard() == []
    assert not leases.table.revoke_youngest()
    assert (len(leases.table), leases.pool.num_active) == (1, 0)
    leases.check()


@pytest.mark.parametrize(
    ("names", "transfer_id"),
    [("", None), ("aa", None), ("abcdefghi", None), ("a", "0F" * 16), ("a", "")],
)
def test_a_lease_that_makes_no_sense_is_complete_with_nothing(names: str, transfer_id: str | None) -> None:
    leases = Leases()  # of eight blocks
    leases.cache("a")
    leases.table.open(LEASE, _hashes(names), transfer_id)
    assert leases.heard() == [("D/1", [], True)]
    assert (len(leases.table), leases.pool.num_active) == (0, 0)


def test_more_leases_than_allowed_are_refused_and_a_second_of_one_name_is_ignored() -> None:
    leases = Leases(terms=LeaseTerms(max_leases=1))
    leases.cache("ab")
    leases.table.open(LEASE, _hashes("a"), None)
    leases.table.open(LEASE, _hashes("b"), None)
    leases.table.open(OTHER, _hashes("b"), None)
    assert leases.heard() == [("D/1", [(0, 0)], True), ("D/2", [], True)]


def test_ended_transfers_are_remembered_only_so_many() -> None:
    leases = Leases(terms=LeaseTerms(max_remembered=2))
    transfers = [f"{number:032x}" for number in range(3)]
    for transfer_id in transfers:
        leases.table.request_came(transfer_id)
        leases.table.request_ended(transfer_id)
    for number, transfer_id in enumerate(transfers):
        leases.table.open(LeaseId(str(number)), _hashes("a"), transfer_id)
    assert leases.heard() == [("1", [], True), ("2", [], True)]  # the first waits for its request


def test_a_spoiled_block_is_zeroed_once_no_lease_holds_it() -> None:
    leases = Leases()
    (block,) = leases.cache("a")
    leases.table.open(LEASE, _hashes("a"), None)
    offered = leases.pool.generations[block]
    leases.pool.spoil(block)
    assert leases.pool.generations[block] == offered + 1
    assert leases.pool.take_zero_blocks() == ()
    leases.table.close_all()
    assert leases.pool.take_zero_blocks() == (block,)
    leases.check()


class Reader:
    """What an engine tells of its blocks: (number of offers, is complete)."""

    def __init__(self) -> None:
        self.told: list[tuple[int, bool]] = []

    def __call__(self, lease_id: LeaseId, offers: tuple[BlockOffer, ...], is_complete: bool) -> None:
        self.told.append((len(offers), is_complete))


PROMPT = numbers(23)
OPEN = OpenLease(LEASE, tuple(block_hashes(PROMPT, 4)), TRANSFER)


def test_the_engine_offers_blocks_after_the_step_that_sealed_them() -> None:
    reader = Reader()
    engine, _ = make_engine(num_blocks=6, block_size=4, max_step_tokens=8, on_offer=reader)
    engine.handle(OPEN)
    engine.add(replace(make_request("p", PROMPT, 0), transfer_id=TRANSFER))
    run(engine)
    assert reader.told == [(2, False), (2, False), (1, True)]
    stats = engine.stats()
    assert (stats.kv_leases, stats.active_blocks, stats.free_blocks) == (1, 5, 1)
    engine.handle(CloseLease(LEASE))
    assert engine.stats().cached_blocks == 5


def test_readers_hear_at_once_of_a_request_that_is_aborted_or_refused() -> None:
    reader = Reader()
    engine, _ = make_engine(block_size=4, max_step_tokens=8, on_offer=reader)
    engine.handle(OPEN)
    engine.add(replace(make_request("p", PROMPT, 0), transfer_id=TRANSFER))
    engine.step()
    engine.abort(RequestId("p"))
    assert reader.told == [(2, False), (0, True)]
    other = "f0" * 16
    engine.handle(OpenLease(OTHER, tuple(block_hashes(numbers(9, 5), 4)), other))
    with pytest.raises(RequestRefused):
        engine.add(replace(make_request("q", (1000,), 0), transfer_id=other))
    assert reader.told[2:] == [(0, True)]


def test_a_sequence_that_runs_takes_leased_blocks_rather_than_stop() -> None:
    reader = Reader()
    engine, _ = make_engine(num_blocks=8, block_size=4, expected_output_tokens=1, on_offer=reader)
    engine.add(make_request("before", PROMPT[:13], 0))
    run(engine)
    engine.handle(replace(OPEN, transfer_id=None))
    assert reader.told == [(3, True)]
    engine.add(make_request("next", numbers(8, 5), 24))
    run(engine)
    stats = engine.stats()
    assert (stats.kv_leases, stats.preemptions_total, stats.active_blocks) == (0, 0, 0)


def test_without_prefix_reuse_there_is_nothing_to_read() -> None:
    reader = Reader()
    engine, _ = make_engine(block_size=4, prefix_reuse=False, on_offer=reader)
    engine.handle(OPEN)
    engine.add(replace(make_request("p", PROMPT, 0), transfer_id=TRANSFER))
    run(engine)
    assert reader.told == [(0, True)]
