"""What a router believes of the groups while directories come and go."""

from __future__ import annotations

from router.directory_source import KnownGroups
from tests.unit.directory.entries import FakeClock, make_entry
from workers.directory.groups import LEASE_S, GroupEntry, GroupListing, GroupPhase


def listing(directory: str, version: int, *entries: GroupEntry) -> GroupListing:
    return GroupListing(directory_id=directory, version=version, entries=entries)


def entry(name: str, phase: GroupPhase = GroupPhase.READY, port: int | None = 7000) -> GroupEntry:
    base = make_entry(name, phase=phase)
    return GroupEntry(
        group_id=base.group_id,
        replica_id=name,
        pool=base.pool,
        role=base.role,
        epoch=1,
        phase=phase,
        address=("127.0.0.1", port) if port is not None else None,
    )


def test_only_groups_that_listen_are_known_and_only_ready_ones_take_requests() -> None:
    known = KnownGroups(FakeClock())
    assert known.version is None
    known.take(
        listing("d1", 3, entry("a"), entry("b", GroupPhase.FAILED), entry("c", GroupPhase.LOADING, port=None))
    )
    assert known.version == ("d1", 3)
    assert {key: address.is_draining for key, address in known.addresses().items()} == {"a": False, "b": True}


def test_a_new_directory_inherits_the_groups_of_the_old_one_for_a_lease() -> None:
    clock = FakeClock()
    known = KnownGroups(clock)
    known.take(listing("d1", 5, entry("a"), entry("b")))
    known.take(listing("d2", 0))
    assert set(known.addresses()) == {"a", "b"}
    known.take(listing("d2", 1, entry("a", port=7001)))
    assert known.addresses()["a"].port == 7001  # type: ignore[index]  # plain text as id
    assert set(known.addresses()) == {"a", "b"}
    clock.now += LEASE_S
    assert set(known.addresses()) == {"a"}


def test_what_the_same_directory_no_longer_lists_is_gone_at_once() -> None:
    known = KnownGroups(FakeClock())
    known.take(listing("d1", 1, entry("a"), entry("b")))
    known.take(listing("d1", 2, entry("b")))
    assert set(known.addresses()) == {"b"}
