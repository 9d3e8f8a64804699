"""The directory's list of groups, for a router. Remembers what it was told: routers outlive the directory."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from workers.directory.actor import NAMESPACE, directory_name
from workers.directory.groups import LEASE_S, GroupListing, GroupPhase
from workers.types import GroupAddress, GroupId, Role

_WAIT_S = 5.0  # how long the directory may hold a question until there is news

_log = logging.getLogger(__name__)


class KnownGroups:
    """What a router believes of the groups, from listings of directories that may come and go.

    A directory that has just been made anew is empty until the fronts have registered again: for one lease
    after its first listing, groups that only the old one knew stay.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._listing: GroupListing | None = None
        self._inherited: dict[GroupId, GroupAddress] = {}
        self._inherited_until = 0.0
        self._addresses: dict[GroupId, GroupAddress] = {}

    @property
    def version(self) -> tuple[str, int] | None:
        """Of the last listing: what to ask news for."""
        return (self._listing.directory_id, self._listing.version) if self._listing is not None else None

    def take(self, listing: GroupListing) -> None:
        """Believe a listing."""
        now = self._clock()
        if self._listing is not None and listing.directory_id != self._listing.directory_id:
            self._inherited, self._inherited_until = self.addresses(), now + LEASE_S
        self._listing = listing
        self._addresses = {
            entry.group_id: GroupAddress(
                group_id=entry.group_id,
                replica_id=entry.replica_id,
                host=entry.address[0],
                port=entry.address[1],
                role=entry.role,
                epoch=entry.epoch,
                is_draining=entry.phase is not GroupPhase.READY,
                is_leaving=entry.phase is GroupPhase.DRAINING,
            )
            for entry in listing.entries
            if entry.address is not None
        }

    @property
    def is_one_coming(self) -> bool:
        """Whether a group that will answer is being started."""
        entries = self._listing.entries if self._listing is not None else ()
        return any(entry.phase is GroupPhase.LOADING and entry.role is not Role.PREFILL for entry in entries)

    def addresses(self) -> dict[GroupId, GroupAddress]:
        """Groups that listen somewhere, by id."""
        inherited = self._inherited if self._clock() < self._inherited_until else {}
        return {**inherited, **self._addresses}


class DirectoryHandle:
    """Ray's handle of the directory actor of an application: looked up when first needed, and again when it
    was lost.

    One look-up at a time. Without Ray's control plane it takes a minute and cannot be stopped, and the loop's
    threads, of which it holds one, have requests to work for.
    """

    def __init__(self, application: str, find: Callable[[str], ActorHandle[Any]] | None = None) -> None:
        """`find` blocks; Ray's look-up when not given."""
        self._application = application
        self._find = find or find_directory
        self._finding: asyncio.Task[ActorHandle[Any]] | None = None

    async def get(self) -> Any:
        """Raises RayError or ValueError without a directory."""
        finding = self._finding
        if finding is None:
            finding = self._finding = asyncio.create_task(asyncio.to_thread(self._find, self._application))
        try:
            return await asyncio.shield(finding)
        except Exception:  # whatever Ray raises: the next call looks again
            if self._finding is finding:
                self._finding = None
            raise

    def lose(self) -> None:
        """The actor has gone: the next call looks for another."""
        self._finding = None


class DirectorySource:
    """Asks the directory of an application."""

    def __init__(self, directory: DirectoryHandle) -> None:
        self._directory = directory
        self._known = KnownGroups(time.monotonic)
        self._is_lost = False

    def is_one_coming(self) -> bool:
        """Whether a group that will answer is being started, as the directory has said last."""
        return self._known.is_one_coming

    async def __call__(self) -> Sequence[GroupAddress]:
        """The groups; waits a few seconds for news. Without a directory: those known."""
        try:
            directory = await self._directory.get()
            self._known.take(await directory.listing.remote(self._known.version, _WAIT_S))
            self._note_loss(None)
        except (RayError, ValueError) as error:  # ValueError: no actor of that name
            self._directory.lose()
            self._note_loss(error)
        return tuple(self._known.addresses().values())

    def _note_loss(self, error: Exception | None) -> None:
        """Logs once that the directory is lost, and once that it is back."""
        if error is not None and not self._is_lost:
            _log.warning("the directory of groups is lost; the groups known stay in use: %r", error)
        if error is None and self._is_lost:
            _log.info("the directory of groups is back")
        self._is_lost = error is not None


def find_directory(application: str) -> ActorHandle[Any]:
    """The directory of an application. Raises ValueError when there is none. Asks Ray: not on a loop."""
    handle: ActorHandle[Any] = ray.get_actor(directory_name(application), namespace=NAMESPACE)
    return handle
