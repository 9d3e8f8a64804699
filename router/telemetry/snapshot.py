"""All that a router replica has counted, as plain data: how it travels, and what several say together.

Series of a replica are its own truth and are shown as they are. Of a group every router has a copy, in which
only time makes a difference: totals never fall, so the highest is the newest; levels come from the router
with the newest stats. Levels of a replica that has gone are nobody's any more; its totals stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from workers.metrics.spec import Series

LIVE_S = 5.0  # a replica whose snapshot is older than this has gone


class GroupCounts(msgspec.Struct, frozen=True, kw_only=True):
    """What one router knows of a group."""

    group: str
    role: str
    epoch: int
    num_steps: int  # of the epoch: stats with more steps are newer
    is_connected: bool
    gauges: list[Series]  # empty: the router does not follow the group any more
    totals: list[Series]


class RouterSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """All cells of one replica. Without gauges: its last word."""

    model: str
    replica: str
    totals: list[Series]  # counters and histograms
    gauges: list[Series]
    groups: list[GroupCounts]

    def totals_only(self) -> RouterSnapshot:
        """Without levels, which hold only while the replica lives."""
        groups = [msgspec.structs.replace(group, gauges=[]) for group in self.groups]
        return msgspec.structs.replace(self, gauges=[], groups=groups)

    def own_only(self) -> RouterSnapshot:
        """Without the totals of groups, of which another router may have told higher ones already."""
        groups = [msgspec.structs.replace(group, totals=[]) for group in self.groups]
        return msgspec.structs.replace(self, groups=groups)


@dataclass(frozen=True, slots=True)
class ReplicaRow:
    """A replica's snapshot and its age, seconds."""

    snapshot: RouterSnapshot
    age_s: float


@dataclass(frozen=True, slots=True)
class GroupRow:
    """What all routers together know of a group."""

    model: str
    group: str
    role: str
    gauges: list[Series]
    totals: list[Series]


def encode(snapshot: RouterSnapshot) -> bytes:
    """As MessagePack."""
    return msgspec.msgpack.encode(snapshot)


def decode(body: bytes) -> RouterSnapshot:
    """Raises msgspec.DecodeError, also for a snapshot of another shape."""
    return msgspec.msgpack.decode(body, type=RouterSnapshot)


def living(row: ReplicaRow) -> ReplicaRow:
    """The row without levels when its replica has gone."""
    return row if row.age_s <= LIVE_S else ReplicaRow(row.snapshot.totals_only(), row.age_s)


def merged_groups(rows: Sequence[ReplicaRow]) -> list[GroupRow]:
    """Each group once, by model and id."""
    copies: dict[tuple[str, str], list[tuple[GroupCounts, float]]] = {}
    for row in rows:
        for group in row.snapshot.groups:
            copies.setdefault((row.snapshot.model, group.group), []).append((group, row.age_s))
    return [_merged(model, group, found) for (model, group), found in sorted(copies.items())]


def _merged(model: str, group: str, copies: list[tuple[GroupCounts, float]]) -> GroupRow:
    def newness(copy: tuple[GroupCounts, float]) -> tuple[bool, int, bool, int, float]:
        counts, age_s = copy
        return bool(counts.gauges), counts.epoch, counts.is_connected, counts.num_steps, -age_s

    newest, _ = max(copies, key=newness)
    totals: dict[tuple[str, str], float] = {}
    for counts, _ in copies:
        for name, label, value in counts.totals:
            totals[name, label] = max(value, totals.get((name, label), value))
    series = [(name, label, value) for (name, label), value in totals.items()]
    return GroupRow(model=model, group=group, role=newest.role, gauges=newest.gauges, totals=series)
