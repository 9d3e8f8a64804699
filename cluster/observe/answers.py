"""A page's queries, asked of a Prometheus."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cluster.observe.prometheus_api import Line, PrometheusApi
from dashboards.grafana import Dashboard, Panel, Query

_VARIABLE = re.compile(r"\$\{?\w+\}?")
_LABEL = re.compile(r"\{\{\s*(\w+)\s*\}\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """The times that are asked for, seconds since 1970, and the distance between two of them."""

    start: float
    end: float
    step_s: float
    rate_s: int = 60  # window of rates; Grafana takes at least four times the scrape interval


@dataclass(frozen=True, slots=True)
class Answer:
    """One query of a panel and what came."""

    query: Query
    expr: str  # as it was asked
    lines: Sequence[Line]

    @property
    def problem(self) -> str:
        """Nothing; or "empty", or "NaN" when no value is a number."""
        values = [value for line in self.lines for _, value in line.values]
        if not values:
            return "empty"
        return "" if any(math.isfinite(value) for value in values) else "NaN"


def filled(expr: str, *, rate_s: int, model: str = ".*", group: str = ".*") -> str:
    """A query with Grafana's variables filled in. Raises KeyError for one that pages do not have."""
    values = {"$__rate_interval": f"{rate_s}s", "$model": model, "$group": group}
    return _VARIABLE.sub(lambda match: values[match[0]], expr)


def ask(api: PrometheusApi, panel: Panel, times: Range) -> list[Answer]:
    """All queries of a panel. Raises ObserveError."""
    answers = []
    for query in panel.queries:
        expr = filled(query.expr, rate_s=times.rate_s)
        lines = api.query_range(expr, start=times.start, end=times.end, step_s=times.step_s)
        answers.append(Answer(query, expr, lines))
    return answers


def ask_page(api: PrometheusApi, page: Dashboard, times: Range) -> Iterator[tuple[Panel, list[Answer]]]:
    """Every panel of a page with its answers, in order. Raises ObserveError."""
    for panel in page.panels:
        yield panel, ask(api, panel, times)


def name_of(query: Query, line: Line) -> str:
    """What a line is called, as Grafana would."""
    if not query.legend:
        return ", ".join(f"{label}={value}" for label, value in line.labels.items()) or "value"
    return _LABEL.sub(lambda match: line.labels.get(match[1], ""), query.legend)
