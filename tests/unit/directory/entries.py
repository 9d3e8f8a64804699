"""Entries of groups in a directory, and its clock."""

from __future__ import annotations

from workers.directory.groups import GroupEntry, GroupPhase
from workers.types import GroupId, Role


class FakeClock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make_entry(
    name: str = "unified-a", *, epoch: int = 1, phase: GroupPhase = GroupPhase.READY
) -> GroupEntry:
    return GroupEntry(
        group_id=GroupId(name), replica_id="a", pool="unified", role=Role.UNIFIED, epoch=epoch, phase=phase
    )
