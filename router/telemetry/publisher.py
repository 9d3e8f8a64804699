"""One `/metrics` for all router replicas, whichever of them is asked.

Every replica publishes its cells about once a second, and once more when it ends. A scrape first publishes
the asked replica's cells and then answers with what the board holds for all: as snapshots of a replica only
ever get newer there, no series falls between two scrapes. When the board is away, the answer has the asked
replica's own series alone: a series that is missing once does no harm, one that shows an older value would
look like a restart and be counted twice. Nothing here is on the path of a request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec
from prometheus_client.metrics_core import Metric

from router.tasks import end_tasks
from router.telemetry.exposition import render, replica_families
from router.telemetry.loop_lag import observe_lag
from router.telemetry.metrics import RouterMetrics
from router.telemetry.snapshot import ReplicaRow, RouterSnapshot, decode, encode
from router.telemetry.table import TELEMETRY_FAILURES
from workers.directory.snapshots import HeldSnapshot, Snapshot
from workers.tasks import start_task

PERIOD_S = 1.0
TIMEOUT_S = 2.0  # for the board to answer
_log = logging.getLogger(__name__)


class Board(Protocol):
    """Where the replicas of an application leave their snapshots. Both calls may raise anything."""

    async def publish(self, snapshot: Snapshot) -> None:
        """See `workers.directory.snapshots.SnapshotTable.publish`."""
        ...

    async def held(self) -> Sequence[HeldSnapshot]:
        """See `workers.directory.snapshots.SnapshotTable.held`."""
        ...


class MetricsPublisher:
    """Publishes the cells of one replica and answers scrapes. Lives on the replica's event loop."""

    def __init__(
        self,
        metrics: RouterMetrics,
        board: Board | None = None,
        *,
        period_s: float = PERIOD_S,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Without a board the replica is alone, and answers with its own cells."""
        self._metrics = metrics
        self._board = board
        self._period_s = period_s
        self._timeout_s = timeout_s
        self._number = 0
        self._is_failing = False
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Publish from now on, and watch the event loop."""
        self._tasks = [
            start_task(self._keep(), "publishing of this replica's counts"),
            start_task(observe_lag(self._metrics.loop_lag_s), "watching of the event loop"),
        ]

    async def stop(self) -> None:
        """The last word of this replica: its totals, without levels. May be called twice."""
        if not self._tasks:
            return
        tasks, self._tasks = self._tasks, []
        await end_tasks(*tasks)
        await self._exchange(self._metrics.snapshot().totals_only())

    def own_families(self) -> Iterable[Metric]:
        """The replica's own series as of now; may be walked through in a thread."""
        return replica_families([ReplicaRow(self._metrics.snapshot(), 0.0)])

    async def text(self) -> bytes:
        """The body of `/metrics`."""
        own = self._metrics.snapshot()
        rows = [ReplicaRow(own, 0.0)]
        if self._board is not None:
            held = await self._exchange(own, is_asking=True)
            rows = [ReplicaRow(own.own_only(), 0.0)] if held is None else self._decoded(held)
        return await asyncio.to_thread(render, rows)

    async def _keep(self) -> None:
        while True:
            await self._exchange(self._metrics.snapshot())
            await asyncio.sleep(self._period_s)

    async def _exchange(
        self, own: RouterSnapshot, *, is_asking: bool = False
    ) -> Sequence[HeldSnapshot] | None:
        """Publishes; gives what the board holds when asking. None when the board is away."""
        assert self._board is not None
        self._number += 1
        snapshot = Snapshot(source=own.replica, number=self._number, body=encode(own))
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._board.publish(snapshot)
                held = await self._board.held() if is_asking else ()
        except Exception as error:  # whatever the board's transport raises: serving goes on without it
            self._metrics.count(TELEMETRY_FAILURES)
            if not self._is_failing:
                _log.warning("counts of replica %s are not published: %r", own.replica, error)
            self._is_failing = True
            return None
        self._is_failing = False
        return held

    def _decoded(self, held: Sequence[HeldSnapshot]) -> list[ReplicaRow]:
        rows = []
        for row in held:
            try:
                rows.append(ReplicaRow(decode(row.snapshot.body), row.age_s))
            except msgspec.DecodeError as error:  # of a router of another version, while an update runs
                self._metrics.count(TELEMETRY_FAILURES)
                _log.warning("counts of replica %s are not understood: %s", row.snapshot.source, error)
        return rows
