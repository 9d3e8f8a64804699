"""The table of snapshots: the newest number stays, and rows of those that have gone stay for a while."""

from __future__ import annotations

from tests.unit.directory.entries import FakeClock
from workers.directory.snapshots import RETAIN_S, HeldSnapshot, Snapshot, SnapshotTable


def snapshot(source: str, number: int) -> Snapshot:
    return Snapshot(source=source, number=number, body=b"%d" % number)


def test_the_newest_number_stays() -> None:
    clock = FakeClock()
    table = SnapshotTable(clock=clock)
    for number in (1, 3, 2, 3):  # one comes late, one twice
        table.publish(snapshot("b", number))
        clock.now += 1.0
    table.publish(snapshot("a", 7))
    assert table.held() == (
        HeldSnapshot(snapshot=snapshot("a", 7), age_s=0.0),
        HeldSnapshot(snapshot=snapshot("b", 3), age_s=3.0),
    )


def test_a_source_that_has_gone_is_forgotten_after_a_while() -> None:
    clock = FakeClock()
    table = SnapshotTable(clock=clock)
    table.publish(snapshot("a", 9))
    clock.now += RETAIN_S - 1.0
    table.publish(snapshot("b", 1))
    assert [row.snapshot.source for row in table.held()] == ["a", "b"]
    clock.now += 1.0
    assert [row.snapshot.source for row in table.held()] == ["b"]
    table.publish(snapshot("a", 1))  # nothing is remembered of it
    assert [row.snapshot.number for row in table.held()] == [1, 1]
