"""Which worker groups exist, and where rank 0 of each listens. Off the request path.

Life cycle of an entry: a front registers its group as `loading`, again as `ready` with the address, and
renews the lease every two seconds; it changes the entry to `draining` or `failed` with a reason, and
withdraws it at the end. An entry whose lease ran out counts as gone: its front is dead or cut off.

Routers ask for the list with the version they have and get an answer when it changes or after a while.
They keep what they know when the directory is away. The directory holds nothing that its fronts do not
know: when it dies, the next renewal makes a new one and every front registers again.

Beside the groups it keeps the routers' latest counts (`snapshots`), which all routers reach already, and what
autoscaling decided last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

from workers.directory.snapshots import SnapshotTable
from workers.types import GroupId, Role

LEASE_S = 10.0
RENEW_S = 2.0


class GroupPhase(Enum):
    """Where a group is in its life."""

    LOADING = "loading"  # ranks start and read weights
    READY = "ready"  # takes requests
    DRAINING = "draining"  # finishes what it has
    FAILED = "failed"  # about to be replaced


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupEntry:
    """What a front says of its group."""

    group_id: GroupId
    replica_id: str  # of the Serve replica that is the group's front
    pool: str
    role: Role
    epoch: int
    phase: GroupPhase
    address: tuple[str, int] | None = None  # rank 0's socket for routers; None before it listens
    reason: str = ""  # why, when failed; what it is doing, when loading
    rank_pids: tuple[int, ...] = ()
    restarts: int = 0  # groups of this pool that ended in failure so far; filled in by the directory


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupListing:
    """All groups with a valid lease. Equal versions of one directory mean equal entries."""

    directory_id: str  # new for every start of a directory: versions of two starts do not compare
    version: int
    entries: tuple[GroupEntry, ...]
    scaling: str = ""  # the last decision of autoscaling, JSON; empty: there is none


class GroupDirectory:
    """Entries under leases. Times come from the injected clock; nothing here waits."""

    def __init__(self, directory_id: str, *, lease_s: float = LEASE_S, clock: Callable[[], float]) -> None:
        self._id = directory_id
        self._lease_s = lease_s
        self._clock = clock
        self._entries: dict[GroupId, GroupEntry] = {}
        self._expires: dict[GroupId, float] = {}
        self._failures: Counter[str] = Counter()  # by pool
        self._version = 0
        self.scaling = ""  # see `GroupListing`; changes of it are no news
        self.snapshots = SnapshotTable(clock=clock)

    def register(self, entry: GroupEntry) -> None:
        """Put an entry, or change it, and start its lease. An older epoch than the known one is ignored."""
        known = self._entries.get(entry.group_id)
        if known is not None and known.epoch > entry.epoch:
            return
        self._expires[entry.group_id] = self._clock() + self._lease_s
        if known != entry:
            if entry.phase is GroupPhase.FAILED and (known is None or known.phase is not GroupPhase.FAILED):
                self._failures[entry.pool] += 1
            self._entries[entry.group_id] = entry
            self._version += 1

    def renew(self, group_id: GroupId, epoch: int) -> bool:
        """Extend the lease. False: not known here, the front must register again."""
        known = self._entries.get(group_id)
        if known is None or known.epoch != epoch:
            return False
        self._expires[group_id] = self._clock() + self._lease_s
        return True

    def withdraw(self, group_id: GroupId, epoch: int) -> None:
        """Remove an entry; nothing happens when it is gone or of a newer epoch."""
        known = self._entries.get(group_id)
        if known is not None and known.epoch <= epoch:
            self._drop(group_id)

    def expire(self) -> None:
        """Remove entries whose lease ran out."""
        now = self._clock()
        for group_id in [group_id for group_id, end in self._expires.items() if end <= now]:
            if self._entries[group_id].phase in (GroupPhase.LOADING, GroupPhase.READY):
                self._failures[self._entries[group_id].pool] += 1  # the front died without a word
            self._drop(group_id)

    def listing(self) -> GroupListing:
        """The groups with a valid lease, by id."""
        self.expire()
        entries = tuple(
            replace(entry, restarts=self._failures[entry.pool]) for _, entry in sorted(self._entries.items())
        )
        return GroupListing(
            directory_id=self._id, version=self._version, entries=entries, scaling=self.scaling
        )

    def _drop(self, group_id: GroupId) -> None:
        del self._entries[group_id]
        del self._expires[group_id]
        self._version += 1
