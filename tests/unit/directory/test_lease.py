"""A front's entry in a directory that fails in every way: it comes back as soon as the directory does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from ray.exceptions import RayError

from tests.unit.data_plane.fakes import until
from tests.unit.directory.entries import make_entry
from workers.directory.groups import GroupEntry, GroupPhase
from workers.directory.lease import DirectoryLease


class Method:
    """As an actor's method is called."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    async def remote(self, *arguments: object) -> Any:
        return self._call(*arguments)


class Directory:
    """Knows one entry; raises what is in `faults` first."""

    def __init__(self) -> None:
        self.faults: list[Exception] = []
        self.entry: GroupEntry | None = None
        self.num_renewals = 0
        self.register, self.renew, self.withdraw = (
            Method(self._register),
            Method(self._renew),
            Method(self._forget),
        )

    def _register(self, entry: GroupEntry) -> None:
        if self.faults:
            raise self.faults.pop(0)
        self.entry = entry

    def _renew(self, *_: object) -> bool:
        if self.faults:
            raise self.faults.pop(0)
        self.num_renewals += 1
        return self.entry is not None

    def _forget(self, *_: object) -> None:
        self.entry = None


@pytest.mark.parametrize(
    "fault", [RayError("away"), ValueError("the name"), RuntimeError("not a kind we know")]
)
def test_whatever_fails_the_entry_is_told_again(fault: Exception) -> None:
    async def run() -> None:
        directory = Directory()
        directory.faults = [fault, fault]
        lease = DirectoryLease("app", make_entry(), open_directory=lambda *_: directory, renew_s=0.01)
        lease.start()
        await until(lambda: directory.num_renewals > 2)
        directory.faults, directory.entry = [fault], None  # it fails once more, and a new one knows nothing
        await until(lambda: directory.entry is not None)
        await lease.stop()
        assert directory.entry is None

    asyncio.run(run())


def test_a_change_is_told_at_once() -> None:
    async def run() -> None:
        directory = Directory()
        lease = DirectoryLease("app", make_entry(), open_directory=lambda *_: directory, renew_s=60.0)
        lease.start()
        await until(lambda: directory.entry is not None)
        changed = replace(lease.entry, phase=GroupPhase.DRAINING)
        lease.change(changed)
        await until(lambda: directory.entry == changed)
        await lease.stop()

    asyncio.run(run())
