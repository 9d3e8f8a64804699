"""The text of `/metrics`: snapshots of replicas in the names, labels and buckets of the two tables.

What a snapshot of another version has besides them is left out. Series of a replica carry `model` and
`replica`, those of a group `model`, `group` and `role`: a sum over all series counts each thing once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry

from router.telemetry.snapshot import ReplicaRow, living, merged_groups
from router.telemetry.table import ROUTER_LABELS, ROUTER_METRICS, TELEMETRY_AGE
from workers.metrics.families import Source, families
from workers.metrics.group import GROUP_LABELS, GROUP_METRICS


def render(rows: Sequence[ReplicaRow]) -> bytes:
    """Prometheus text format 0.0.4. Takes milliseconds a replica: not for the event loop."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Rows([living(row) for row in rows]))
    return generate_latest(registry)


def replica_families(rows: Sequence[ReplicaRow]) -> Iterator[Metric]:
    """What the replicas themselves have counted."""
    sources = [
        Source(
            (row.snapshot.model, row.snapshot.replica),
            [*row.snapshot.totals, *row.snapshot.gauges, (TELEMETRY_AGE.name, "", row.age_s)],
        )
        for row in rows
    ]
    return families(ROUTER_METRICS, ROUTER_LABELS, sources)


class _Rows(Collector):
    """What prometheus_client wants to be given."""

    def __init__(self, rows: Sequence[ReplicaRow]) -> None:
        self._rows = rows

    def collect(self) -> Iterator[Metric]:
        """All families."""
        yield from replica_families(self._rows)
        groups = [
            Source((row.model, row.group, row.role), [*row.gauges, *row.totals])
            for row in merged_groups(self._rows)
        ]
        yield from families(GROUP_METRICS, GROUP_LABELS, groups)
