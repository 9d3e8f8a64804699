"""A row of a table of metrics, and its series while they travel.

A series is (name of the table, values of its own labels with spaces between, value). A histogram travels as
one series a bucket, whose label text ends in the bucket's upper bound, and one that ends in "sum"; empty
buckets are left out. So whatever carries on or compares counters does so for histograms too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from workers.histogram import HistogramCounts

PREFIX = "tandem_"
SUM, INFINITE = "sum", "+Inf"

Series = tuple[str, str, float]


class Kind(Enum):
    """As Prometheus calls them."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One row. What it is of (`model`, and `replica` or `group` and `role`) comes first on every series."""

    name: str  # without prefix, and without a counter's _total
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()  # its own; values are from closed sets and have no spaces
    buckets: tuple[float, ...] = ()  # upper bounds, of histograms

    @property
    def shown_name(self) -> str:
        """As queries say it; of a histogram `_bucket`, `_sum` and `_count` follow."""
        return PREFIX + self.name + ("_total" if self.kind is Kind.COUNTER else "")

    @property
    def bounds(self) -> tuple[str, ...]:
        """Upper bounds as `le` says them."""
        return (*map(str, self.buckets), INFINITE)


def counter(name: str, help: str, *labels: str) -> MetricSpec:
    """A total, which never falls."""
    return MetricSpec(name, Kind.COUNTER, help, labels)


def gauge(name: str, help: str, *labels: str) -> MetricSpec:
    """A level."""
    return MetricSpec(name, Kind.GAUGE, help, labels)


def histogram(name: str, help: str, buckets: tuple[float, ...], *labels: str) -> MetricSpec:
    """A distribution."""
    return MetricSpec(name, Kind.HISTOGRAM, help, labels, buckets)


def histogram_series(spec: MetricSpec, label: str, counts: HistogramCounts) -> Iterator[Series]:
    """A histogram as it travels."""
    start = f"{label} " if label else ""
    yield spec.name, start + SUM, counts.total
    if counts.counts:  # none at all: nothing has been counted yet
        for bound, count in zip(spec.bounds, counts.counts, strict=True):
            if count:
                yield spec.name, start + bound, count
