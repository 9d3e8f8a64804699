"""The latest snapshot of every process that reports its counts, for one answer to whoever scrapes.

A reporter publishes its whole snapshot, numbered from 1, about once a second and once at its end. The newest
number stays, so that what a reader sees of one reporter never falls. A reporter that has gone keeps its row
for a while: what it counted after the last scrape is not lost. The table dies with its process; living
reporters fill the next one within their period. What is in a snapshot only its writers and readers know.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

RETAIN_S = 600.0  # how long the row of a reporter that has gone stays


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All that one reporter has counted."""

    source: str  # of the reporter; new for every start of it
    number: int  # later snapshots of a source have higher ones
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldSnapshot:
    """A snapshot as the table has it."""

    snapshot: Snapshot
    age_s: float  # since it came


class SnapshotTable:
    """Rows by source. Times come from the injected clock; nothing here waits."""

    def __init__(self, *, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._rows: dict[str, tuple[Snapshot, float]] = {}  # with the time it came

    def publish(self, snapshot: Snapshot) -> None:
        """Put a snapshot in the place of the source's last one. One that comes late is ignored."""
        known = self._rows.get(snapshot.source)
        if known is None or known[0].number < snapshot.number:
            self._rows[snapshot.source] = (snapshot, self._clock())
        self._expire()

    def held(self) -> tuple[HeldSnapshot, ...]:
        """All rows, by source."""
        self._expire()
        now = self._clock()
        return tuple(
            HeldSnapshot(snapshot=snapshot, age_s=now - came)
            for _, (snapshot, came) in sorted(self._rows.items())
        )

    def _expire(self) -> None:
        oldest = self._clock() - RETAIN_S
        for source in [source for source, (_, came) in self._rows.items() if came <= oldest]:
            del self._rows[source]
