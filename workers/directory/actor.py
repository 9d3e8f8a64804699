"""The directory of groups as a named Ray actor, one an application. Logic: `workers.directory.groups`."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any, cast

import ray
from ray.actor import ActorHandle

from workers.directory.groups import GroupDirectory, GroupEntry, GroupListing
from workers.directory.snapshots import HeldSnapshot, Snapshot
from workers.types import GroupId

IDLE_EXIT_S = 20.0  # nobody called for so long: the application is gone, the directory ends itself
NAMESPACE = "tandem"


class GroupDirectoryActor:
    """The directory of one application as a named actor. It ends itself when nobody needs it any more."""

    def __init__(self, directory_id: str) -> None:
        self._directory = GroupDirectory(directory_id, clock=time.monotonic)
        self._changed = asyncio.Event()
        self._last_call = time.monotonic()
        self._watch = asyncio.ensure_future(self._tick())

    async def register(self, entry: GroupEntry) -> None:
        """See `GroupDirectory.register`."""
        self._touch()
        before = self._directory.listing().version
        self._directory.register(entry)
        self._notify_since(before)

    async def renew(self, group_id: GroupId, epoch: int) -> bool:
        """See `GroupDirectory.renew`."""
        self._touch()
        return self._directory.renew(group_id, epoch)

    async def withdraw(self, group_id: GroupId, epoch: int) -> None:
        """See `GroupDirectory.withdraw`."""
        self._touch()
        before = self._directory.listing().version
        self._directory.withdraw(group_id, epoch)
        self._notify_since(before)

    async def listing(self, known: tuple[str, int] | None, wait_s: float) -> GroupListing:
        """The list, when it differs from `known` (directory id, version), or after `wait_s` seconds."""
        self._touch()
        deadline = time.monotonic() + wait_s
        while True:
            listing = self._directory.listing()
            left = deadline - time.monotonic()
            if known != (listing.directory_id, listing.version) or left <= 0:
                self._touch()
                return listing
            try:
                await asyncio.wait_for(self._changed.wait(), left)
            except TimeoutError:
                continue

    async def publish(self, snapshot: Snapshot) -> None:
        """See `SnapshotTable.publish`."""
        self._touch()
        self._directory.snapshots.publish(snapshot)

    async def note_scaling(self, decision: str) -> None:
        """Keep the last decision of autoscaling, JSON. Not a call that keeps the directory alive."""
        self._directory.scaling = decision

    async def snapshots(self) -> tuple[HeldSnapshot, ...]:
        """See `SnapshotTable.held`."""
        self._touch()
        return self._directory.snapshots.held()

    def _touch(self) -> None:
        self._last_call = time.monotonic()

    def _notify_since(self, version: int) -> None:
        if self._directory.listing().version != version:
            self._changed.set()  # wakes all that wait now ...
            self._changed = asyncio.Event()  # ... and the next change wakes those that come later

    async def _tick(self) -> None:
        """Notice leases that ran out, and the end of the application."""
        while True:
            before = self._directory.listing().version
            await asyncio.sleep(0.5)
            self._notify_since(before)
            if time.monotonic() - self._last_call > IDLE_EXIT_S:
                os._exit(0)  # exit_actor works only inside a call; there is nothing to flush


def directory_name(application: str) -> str:
    """Name of the directory actor of an application, in namespace NAMESPACE."""
    return f"group-directory:{application}"


def open_directory(application: str, directory_id: str) -> ActorHandle[Any]:
    """The directory of an application; a new one, with the id given, when there is none.

    Blocks for a few milliseconds on Ray's GCS: call it from a thread.
    """
    options = ray.remote(GroupDirectoryActor).options(
        name=directory_name(application),
        namespace=NAMESPACE,
        get_if_exists=True,
        lifetime="detached",
        num_cpus=0,
        max_concurrency=1000,
        enable_task_events=False,  # several calls a second, each of which Ray would note
        scheduling_strategy="DEFAULT",  # not in the caller's placement group, with which it would die
    )
    return cast(ActorHandle[Any], options.remote(directory_id))
