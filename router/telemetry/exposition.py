"""The text of `/metrics`: snapshots of replicas in the names, labels and buckets of the one table.

Names, labels and buckets are those of `metrics` and `group_metrics`; what a snapshot of another
version has besides them is left out. Series of a replica carry `model` and `replica`, those of a group
`model` and `group`: a sum over all series counts each thing once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry

from router.telemetry.group_metrics import EPOCH, GROUP_GAUGES, GROUP_TOTALS, UP
from router.telemetry.metric_spec import PREFIX, MetricSpec
from router.telemetry.metrics import COUNTERS, GAUGES, HISTOGRAMS, TELEMETRY_AGE
from router.telemetry.snapshot import GroupRow, HistogramCounts, ReplicaRow, Series, living, merged_groups

_REPLICA, _GROUP = ("model", "replica"), ("model", "group")
Labelled = tuple[Sequence[str], Sequence[Series]]  # values of the first two labels; the series


def render(rows: Sequence[ReplicaRow]) -> bytes:
    """Prometheus text format 0.0.4. Takes milliseconds a replica: not for the event loop."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Rows([living(row) for row in rows]))
    return generate_latest(registry)


class _Rows(Collector):
    """What prometheus_client wants to be given."""

    def __init__(self, rows: Sequence[ReplicaRow]) -> None:
        self._rows = rows

    def collect(self) -> Iterator[Metric]:
        """All families."""
        rows = [(_replica_labels(row), row.snapshot) for row in self._rows]
        counters: list[Labelled] = [(labels, snapshot.counters) for labels, snapshot in rows]
        for spec in COUNTERS:
            yield _counter(spec, _REPLICA, counters)
        for spec in HISTOGRAMS:
            yield _histogram(spec, [(labels, snapshot.histograms) for labels, snapshot in rows])
        gauges: list[Labelled] = [(labels, snapshot.gauges) for labels, snapshot in rows]
        for spec in GAUGES:
            yield _gauge(spec, _REPLICA, gauges)
        ages = [(_replica_labels(row), [(TELEMETRY_AGE.name, "", row.age_s)]) for row in self._rows]
        yield _gauge(TELEMETRY_AGE, _REPLICA, ages)
        yield from _groups(merged_groups(self._rows))


def _replica_labels(row: ReplicaRow) -> Sequence[str]:
    return (row.snapshot.model, row.snapshot.replica)


def _groups(rows: Sequence[GroupRow]) -> Iterator[Metric]:
    gauges: list[Labelled] = [((row.model, row.group), row.gauges) for row in rows]
    for spec in dict.fromkeys((UP, EPOCH, *(metric.spec for metric in GROUP_GAUGES))):
        yield _gauge(spec, _GROUP, gauges)
    totals: list[Labelled] = [((row.model, row.group), row.totals) for row in rows]
    for spec in dict.fromkeys(metric.spec for metric in GROUP_TOTALS):
        yield _counter(spec, _GROUP, totals)


def _counter(spec: MetricSpec, labels: Sequence[str], rows: Iterable[Labelled]) -> Metric:
    family = CounterMetricFamily(PREFIX + spec.name, spec.help, labels=[*labels, *spec.labels])
    for values, value in _of(spec, rows):
        family.add_metric(values, value)
    return family


def _gauge(spec: MetricSpec, labels: Sequence[str], rows: Iterable[Labelled]) -> Metric:
    family = GaugeMetricFamily(PREFIX + spec.name, spec.help, labels=[*labels, *spec.labels])
    for values, value in _of(spec, rows):
        family.add_metric(values, value)
    return family


def _histogram(spec: MetricSpec, rows: Iterable[tuple[Sequence[str], dict[str, HistogramCounts]]]) -> Metric:
    family = HistogramMetricFamily(PREFIX + spec.name, spec.help, labels=_REPLICA)
    for values, histograms in rows:
        cell = histograms.get(spec.name)
        if cell is not None and len(cell.counts) == len(spec.buckets) + 1:
            family.add_metric(values, cumulative(spec.buckets, cell.counts), cell.total)
    return family


def cumulative(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """(upper bound, samples at or below it), with +Inf last."""
    rows: list[tuple[str, float]] = []
    seen = 0
    for bound, count in zip((*map(str, bounds), "+Inf"), counts, strict=True):
        seen += count
        rows.append((bound, seen))
    return rows


def _of(spec: MetricSpec, rows: Iterable[Labelled]) -> Iterator[tuple[list[str], float]]:
    """(label values, value) of the series of a name."""
    for values, series in rows:
        for name, label, value in series:
            if name == spec.name:
                own = label.split(" ", len(spec.labels) - 1) if spec.labels else []
                yield [*values, *own], value
