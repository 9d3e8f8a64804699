"""What a router believes of the groups while directories come and go."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from router.directory_board import DirectoryBoard
from router.directory_source import DirectoryHandle, DirectorySource, KnownGroups
from tests.unit.directory.entries import FakeClock, make_entry
from workers.directory.groups import LEASE_S, GroupEntry, GroupListing, GroupPhase
from workers.types import Role


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


def test_a_group_that_will_answer_is_coming_while_it_is_loaded() -> None:
    known = KnownGroups(FakeClock())
    assert not known.is_one_coming
    loading = entry("c", GroupPhase.LOADING, port=None)
    known.take(listing("d1", 1, entry("a"), replace(loading, role=Role.PREFILL)))
    assert not known.is_one_coming
    known.take(listing("d1", 2, entry("a"), loading))
    assert known.is_one_coming
    known.take(listing("d1", 3, entry("a"), entry("c")))
    assert not known.is_one_coming


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


class FakeMethod:
    """A method of an actor."""

    def __init__(self, results: list[Any]) -> None:
        self._results = results

    async def remote(self, *_: object) -> Any:
        result = self._results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result


class FakeActor:
    """A directory that answers so many calls."""

    def __init__(self, **results: list[Any]) -> None:
        self.listing = FakeMethod(results.get("listing", []))
        self.publish = FakeMethod(results.get("publish", []))


def test_one_lookup_at_a_time_however_many_wait_for_it_and_give_up() -> None:
    calls: list[str] = []
    go_on = threading.Event()
    actor = FakeActor()

    def find(application: str) -> Any:
        calls.append(application)
        go_on.wait(10)
        return actor

    async def test() -> None:
        directory = DirectoryHandle("tandem", find)
        for _ in range(5):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.02):
                    await directory.get()
        waiting = asyncio.create_task(directory.get())
        go_on.set()
        assert await waiting is actor
        assert await directory.get() is actor

    asyncio.run(asyncio.wait_for(test(), 10))
    assert calls == ["tandem"]


def test_a_directory_that_dies_is_looked_up_again_by_whoever_needs_it() -> None:
    dead = RayActorError()
    actors: list[Any] = [
        FakeActor(listing=[listing("d1", 1, entry("a")), dead]),
        ValueError("no actor of that name"),
        FakeActor(listing=[listing("d2", 1, entry("b"))], publish=[None, dead]),
        RuntimeError("Ray is not connected"),
        FakeActor(publish=[None]),
    ]

    def find(_: str) -> Any:
        found = actors.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    async def test() -> None:
        directory = DirectoryHandle("tandem", find)
        source, board = DirectorySource(directory), DirectoryBoard(directory)
        for known in ({"a"}, {"a"}, {"a"}, {"a", "b"}):
            assert {address.group_id for address in await source()} == known
        snapshot: Any = None
        await board.publish(snapshot)
        for error in (RayActorError, RuntimeError):
            with pytest.raises(error):
                await board.publish(snapshot)
        await board.publish(snapshot)

    asyncio.run(asyncio.wait_for(test(), 10))
    assert not actors
