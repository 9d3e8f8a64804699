"""The directory of groups: leases, epochs, versions."""

from __future__ import annotations

from dataclasses import replace

from tests.unit.directory.entries import FakeClock, make_entry
from workers.directory.groups import GroupDirectory, GroupPhase
from workers.types import GroupId


def make_directory() -> tuple[GroupDirectory, FakeClock]:
    clock = FakeClock()
    return GroupDirectory("d1", lease_s=10.0, clock=clock), clock


def test_entries_are_listed_by_id_and_each_change_has_a_version() -> None:
    directory, _ = make_directory()
    assert directory.listing().version == 0
    directory.register(make_entry("b"))
    directory.register(make_entry("a", phase=GroupPhase.LOADING))
    listing = directory.listing()
    assert [entry.group_id for entry in listing.entries] == ["a", "b"]
    assert (listing.directory_id, listing.version) == ("d1", 2)
    directory.register(make_entry("a", phase=GroupPhase.LOADING))  # nothing new
    assert directory.listing().version == 2
    directory.register(make_entry("a"))
    assert directory.listing().version == 3


def test_a_lease_that_is_not_renewed_runs_out() -> None:
    directory, clock = make_directory()
    directory.register(make_entry("a"))
    directory.register(make_entry("b"))
    clock.now += 9.0
    assert directory.renew(GroupId("a"), 1)
    clock.now += 1.0
    assert [entry.group_id for entry in directory.listing().entries] == ["a"]
    assert directory.listing().version == 3
    assert not directory.renew(GroupId("b"), 1)
    clock.now += 9.0
    assert directory.listing().entries == ()


def test_what_an_older_epoch_says_is_ignored() -> None:
    directory, _ = make_directory()
    directory.register(make_entry(epoch=2))
    directory.register(replace(make_entry(epoch=1), reason="late"))
    assert not directory.renew(GroupId("unified-a"), 1)
    directory.withdraw(GroupId("unified-a"), 1)
    assert directory.listing().entries == (make_entry(epoch=2),)
    directory.withdraw(GroupId("unified-a"), 2)
    assert directory.listing().entries == ()
    directory.withdraw(GroupId("unified-a"), 2)
    assert directory.listing().version == 2


def test_failures_of_a_pool_are_counted_once_each() -> None:
    directory, clock = make_directory()
    directory.register(make_entry("a"))
    assert directory.listing().entries[0].restarts == 0
    for _ in range(2):  # a front may say so again
        directory.register(make_entry("a", phase=GroupPhase.FAILED))
    directory.withdraw(GroupId("a"), 1)
    directory.register(make_entry("b"))
    assert directory.listing().entries[0].restarts == 1
    clock.now += 11.0  # the front of b is gone without a word
    directory.register(make_entry("c"))
    directory.expire()
    assert [(entry.group_id, entry.restarts) for entry in directory.listing().entries] == [("c", 2)]
    directory.register(make_entry("c", phase=GroupPhase.DRAINING))
    clock.now += 11.0  # an end that was wanted
    directory.register(make_entry("d"))
    assert [(entry.group_id, entry.restarts) for entry in directory.listing().entries] == [("d", 2)]
