"""A cluster's series over some minutes, from the metric tables, as OpenMetrics text with times.

Counters grow by 2 a second, gauges stand at 3; every bucket of a histogram gets one sample a second.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Final, NamedTuple

from dashboards.ray_series import RAY_LABELS
from router.telemetry.table import ROUTER_LABELS, ROUTER_METRICS
from workers.metrics.group import GROUP_LABELS, GROUP_METRICS
from workers.metrics.spec import Kind, MetricSpec

START: Final = 1_700_000_000
STEP_S: Final = 15
NUM_STEPS: Final = 41  # ten minutes
RATE: Final = 2  # of counters, a second
LEVEL: Final = 3  # of gauges

# Some values of each label that is a metric's own.
VALUES: Final = {
    "reason": ("stop", "error"),
    "code": ("invalid_value", "internal_error"),
    "stage": ("queue", "prefill"),
    "kind": ("prefill", "decode"),
    "source": ("computed", "cached"),
    "reader": ("d",),
    "outcome": ("computed", "refused"),
    "state": ("free", "active", "cached"),
    "bound": ("idle", "compute"),
    "from_role": ("prefill",),
    "to_role": ("decode",),
    "transport": ("copy",),
    "result": ("resumed",),
}
GROUPS: Final = (("m", "p", "prefill"), ("m", "d", "decode"))
REPLICAS: Final = (("m", "r"),)


class Row(NamedTuple):
    """Labels of a series, and what its samples stand for."""

    suffix: str
    labels: str
    per_s: float  # growth
    level: float


def text() -> Iterator[str]:
    """Lines of the file."""
    for specs, names, sources in (
        (ROUTER_METRICS, ROUTER_LABELS, REPLICAS),
        (GROUP_METRICS, GROUP_LABELS, GROUPS),
    ):
        for spec in specs:
            family = spec.shown_name.removesuffix("_total")
            # Cells of a histogram as plain gauges: what a query sees is the same.
            if spec.kind is Kind.HISTOGRAM:
                rows = list(_histogram_rows(spec, names, sources))
                for suffix in ("_bucket", "_sum", "_count"):
                    yield f"# TYPE {family}{suffix} gauge"
                    yield from _samples(family, [row for row in rows if row.suffix == suffix])
            else:
                is_counter = spec.kind is Kind.COUNTER
                yield f"# TYPE {family} {'counter' if is_counter else 'gauge'}"
                suffix, per_s, level = ("_total", RATE, 0) if is_counter else ("", 0, LEVEL)
                rows = [Row(suffix, labels, per_s, level) for labels in _label_sets(spec, names, sources)]
                yield from _samples(family, rows)
    for name, ray_labels in RAY_LABELS.items():
        labels = ",".join(f'{label}="x"' for label in sorted(ray_labels))
        yield f"# TYPE {name} gauge"
        yield from _samples(name, [Row("", "{" + labels + "}", 0, LEVEL)])
    yield "# EOF"


def _histogram_rows(
    spec: MetricSpec, names: Sequence[str], sources: Sequence[Sequence[str]]
) -> Iterator[Row]:
    for labels in _label_sets(spec, names, sources):
        for number, bound in enumerate(spec.bounds, start=1):
            yield Row("_bucket", f'{labels[:-1]},le="{bound}"}}', number, 0)
        yield Row("_sum", labels, 0.5 * len(spec.bounds), 0)
        yield Row("_count", labels, len(spec.bounds), 0)


def _label_sets(spec: MetricSpec, names: Sequence[str], sources: Sequence[Sequence[str]]) -> Iterator[str]:
    for source, own in product(sources, product(*(VALUES.get(label, ("v",)) for label in spec.labels))):
        pairs = zip((*names, *spec.labels), (*source, *own), strict=True)
        yield "{" + ",".join(f'{name}="{value}"' for name, value in pairs) + "}"


def _samples(family: str, rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        for step in range(NUM_STEPS):
            value = row.level + row.per_s * step * STEP_S
            yield f"{family}{row.suffix}{row.labels} {value:g} {START + step * STEP_S}"
