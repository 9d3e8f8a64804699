"""PromQL from rows of the metric tables: a query can name no metric that is not there.

Every function gives an expression. Series of router replicas and of groups are each told once, so sums over
them count nothing twice. `$model` and `$group` are Grafana's variables, `$__rate_interval` its window.
"""

from __future__ import annotations

from dashboards.grafana import Kind, Panel, Query
from workers.metrics.group import GROUP_METRICS
from workers.metrics.spec import Kind as MetricKind
from workers.metrics.spec import MetricSpec

WINDOW = "$__rate_interval"
_GROUP_NAMES = frozenset(spec.name for spec in GROUP_METRICS)


def level(spec: MetricSpec, *matchers: str) -> str:
    """The series of a gauge, e.g. level(KV_BLOCKS, 'state="active"')."""
    assert spec.kind is MetricKind.GAUGE, spec.name
    return spec.shown_name + _selector(spec, matchers)


def rate(spec: MetricSpec, *matchers: str, window: str = WINDOW) -> str:
    """How fast a counter grows, a second."""
    assert spec.kind is MetricKind.COUNTER, spec.name
    return f"rate({spec.shown_name}{_selector(spec, matchers)}[{window}])"


def total(expr: str, *by: str) -> str:
    """Sum over all series, or for each value of labels."""
    return _aggregate("sum", expr, by)


def highest(expr: str, *by: str) -> str:
    """Largest of the series."""
    return _aggregate("max", expr, by)


def average(expr: str, *by: str) -> str:
    """Mean of the series."""
    return _aggregate("avg", expr, by)


def total_rate(spec: MetricSpec, *by: str) -> str:
    """What all count together, a second."""
    return total(rate(spec), *by)


def total_increase(spec: MetricSpec, window: str, *by: str) -> str:
    """What all have counted in a window."""
    assert spec.kind is MetricKind.COUNTER, spec.name
    return total(f"increase({spec.shown_name}{_selector(spec, ())}[{window}])", *by)


def share(part: str, whole: str) -> str:
    """part / whole; nothing where the whole is 0, so that idle times show as gaps."""
    return f"{part} / ({whole} > 0)"


def bucket_rates(spec: MetricSpec, *by: str) -> str:
    """Samples a second below each bound of a histogram."""
    assert spec.kind is MetricKind.HISTOGRAM, spec.name
    return total(f"rate({spec.shown_name}_bucket{_selector(spec, ())}[{WINDOW}])", "le", *by)


def quantile(q: float, spec: MetricSpec, *by: str) -> str:
    """A quantile of a histogram, over all series or for each value of labels."""
    return f"histogram_quantile({q:g}, {bucket_rates(spec, *by)})"


def sum_rate(spec: MetricSpec, *by: str) -> str:
    """The sum of a histogram's samples, a second: of durations, how many seconds a second."""
    assert spec.kind is MetricKind.HISTOGRAM, spec.name
    return total(f"rate({spec.shown_name}_sum{_selector(spec, ())}[{WINDOW}])", *by)


def count_rate(spec: MetricSpec, *by: str) -> str:
    """Samples of a histogram, a second."""
    assert spec.kind is MetricKind.HISTOGRAM, spec.name
    return total(f"rate({spec.shown_name}_count{_selector(spec, ())}[{WINDOW}])", *by)


def mean(spec: MetricSpec, *by: str) -> str:
    """Mean of a histogram's samples."""
    return share(sum_rate(spec, *by), count_rate(spec, *by))


def stat(
    title: str,
    description: str,
    unit: str,
    expr: str,
    *,
    legend: str = "",
    thresholds: tuple[float, ...] = (),
) -> Panel:
    """A number."""
    return Panel(
        title=title,
        description=description,
        unit=unit,
        queries=(Query(expr, legend),),
        kind=Kind.STAT,
        width=3,
        thresholds=thresholds,
    )


def lines(title: str, description: str, unit: str, *queries: Query, is_stacked: bool = False) -> Panel:
    """Lines over time."""
    return Panel(title=title, description=description, unit=unit, queries=queries, is_stacked=is_stacked)


def by_label(
    title: str, description: str, unit: str, expr: str, label: str, *, is_stacked: bool = False
) -> Panel:
    """A line for each value of a label, named by it. `expr` is aggregated by that label."""
    return lines(title, description, unit, Query(expr, f"{{{{{label}}}}}"), is_stacked=is_stacked)


def quantiles(
    title: str,
    description: str,
    spec: MetricSpec,
    *,
    qs: tuple[float, ...] = (0.5, 0.95, 0.99),
    unit: str = "s",
) -> Panel:
    """Quantiles over all series."""
    return lines(title, description, unit, *(Query(quantile(q, spec), f"p{q * 100:g}") for q in qs))


def heatmap(title: str, description: str, unit: str, spec: MetricSpec) -> Panel:
    """A histogram over time."""
    query = Query(bucket_rates(spec), "{{le}}")
    return Panel(title=title, description=description, unit=unit, queries=(query,), kind=Kind.HEATMAP)


def _selector(spec: MetricSpec, matchers: tuple[str, ...]) -> str:
    shared = ['model=~"$model"']
    if spec.name in _GROUP_NAMES:
        shared.append('group=~"$group"')
    return "{" + ", ".join([*shared, *matchers]) + "}"


def _aggregate(operator: str, expr: str, by: tuple[str, ...]) -> str:
    return f"{operator} by ({', '.join(by)}) ({expr})" if by else f"{operator}({expr})"
