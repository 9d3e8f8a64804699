"""Series in the names, labels and buckets of a table, as prometheus_client writes them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from workers.metrics.group import GROUP_LABELS, GROUP_METRICS, GroupSight, group_levels, group_totals
from workers.metrics.spec import SUM, Kind, MetricSpec, Series
from workers.types import GroupInfo

_Cells = dict[str, float]  # of one name: label text -> value


class Source(NamedTuple):
    """Who counted, and what."""

    labels: Sequence[str]  # values of the labels that all its series have
    series: Iterable[Series]


def families(
    specs: Iterable[MetricSpec], shared_labels: Sequence[str], sources: Iterable[Source]
) -> Iterator[Metric]:
    """One family for each row of the table; series that the table does not have are left out."""
    by_name = [(list(source.labels), _by_name(source.series)) for source in sources]
    for spec in specs:
        yield _family(spec, shared_labels, [(labels, cells.get(spec.name, {})) for labels, cells in by_name])


def group_families(group: GroupSight, info: GroupInfo) -> Iterator[Metric]:
    """All of one group."""
    series = (*group_levels(group), *group_totals(group))
    return families(GROUP_METRICS, GROUP_LABELS, [Source((info.model, info.group_id, group.role), series)])


def _by_name(series: Iterable[Series]) -> dict[str, _Cells]:
    names: dict[str, _Cells] = {}
    for name, label, value in series:
        names.setdefault(name, {})[label] = value
    return names


def _family(
    spec: MetricSpec, shared_labels: Sequence[str], rows: Sequence[tuple[list[str], _Cells]]
) -> Metric:
    name, labels = spec.shown_name, [*shared_labels, *spec.labels]
    if spec.kind is Kind.HISTOGRAM:
        return _histogram(spec, HistogramMetricFamily(name, spec.help, labels=labels), rows)
    family: CounterMetricFamily | GaugeMetricFamily
    if spec.kind is Kind.COUNTER:
        family = CounterMetricFamily(name, spec.help, labels=labels)
    else:
        family = GaugeMetricFamily(name, spec.help, labels=labels)
    for shared, cells in rows:
        for label, value in cells.items():
            own = _values(label)
            if len(own) == len(spec.labels):
                family.add_metric([*shared, *own], value)
    return family


def _histogram(
    spec: MetricSpec, family: HistogramMetricFamily, rows: Sequence[tuple[list[str], _Cells]]
) -> Metric:
    for shared, cells in rows:
        histograms: dict[str, _Cells] = {}
        for text, value in cells.items():
            label, _, cell = text.rpartition(" ")
            histograms.setdefault(label, {})[cell] = value
        for label, counts in histograms.items():
            own, total = _values(label), counts.pop(SUM, None)
            # Buckets of another version would be missing in the count.
            if total is not None and len(own) == len(spec.labels) and counts.keys() <= set(spec.bounds):
                family.add_metric([*shared, *own], _cumulative(spec, counts), total)
    return family


def _cumulative(spec: MetricSpec, counts: _Cells) -> list[tuple[str, float]]:
    """(upper bound, samples at or below it), with +Inf last."""
    seen = accumulate(counts.get(bound, 0.0) for bound in spec.bounds)
    return list(zip(spec.bounds, seen, strict=True))


def _values(label: str) -> list[str]:
    return label.split(" ") if label else []
