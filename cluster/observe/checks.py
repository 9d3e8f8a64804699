"""Whether pages and rules are what Grafana and Prometheus take, and name only series that there are.

Grafana's JSON is checked field by field against what the builder may write, not against a live Grafana.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import promql_parser

from cluster.observe.answers import filled
from dashboards.alerts import ALERTS
from dashboards.grafana import COLUMNS, DATASOURCE, Dashboard
from dashboards.pages import PAGES
from dashboards.ray_series import RAY_LABELS
from router.telemetry.table import ROUTER_LABELS, ROUTER_METRICS
from workers.metrics.group import GROUP_LABELS, GROUP_METRICS
from workers.metrics.spec import Kind

_UNITS: Final = frozenset({"short", "s", "percentunit", "percent", "reqps", "ops", "bytes", "Bps", "watt"})
_LEGEND_LABEL: Final = re.compile(r"\{\{(\w+)\}\}")
_MAX_UID: Final = 40


def known_series() -> dict[str, frozenset[str]]:
    """Labels by name of every series that pages and rules may ask for."""
    known = dict(RAY_LABELS)
    for labels, specs in ((ROUTER_LABELS, ROUTER_METRICS), (GROUP_LABELS, GROUP_METRICS)):
        for spec in specs:
            names = frozenset((*labels, *spec.labels))
            if spec.kind is Kind.HISTOGRAM:
                known[f"{spec.shown_name}_bucket"] = names | {"le"}
                known[f"{spec.shown_name}_sum"] = known[f"{spec.shown_name}_count"] = names
            else:
                known[spec.shown_name] = names
    return known


def problems() -> list[str]:
    """Everything that is wrong, a line each."""
    found = []
    for page in PAGES.values():
        found += [f"{page.uid}: {problem}" for problem in _page_problems(page)]
    for alert in ALERTS:
        found += [f"alert {alert.name}: {problem}" for problem in query_problems(alert.expr)]
    return found


def query_problems(expr: str, legend: str = "") -> Iterator[str]:
    """What is wrong with a query and the name of its lines."""
    parts: list[Any] = []
    try:
        text = filled(expr, rate_s=60)
        promql_parser.walk(promql_parser.parse(text), parts.append)
    except KeyError as error:
        yield f"{expr}: no such variable: {error.args[0]}"
        return
    except ValueError as error:
        yield f"{expr}: {error}"
        return
    known, labels = known_series(), set[str]()
    for name, matchers in _selectors(parts):
        if name not in known:
            yield f"{expr}: no metric {name}"
            continue
        labels |= known[name]
        if unknown := matchers - known[name]:
            yield f"{expr}: {name} has no label {', '.join(sorted(unknown))}"
    grouped: set[str] = set()
    for part in parts:
        if isinstance(part, promql_parser.AggregateExpr) and part.modifier is not None:
            grouped |= set(part.modifier.labels)
        elif isinstance(part, promql_parser.Call):
            yield from (f"{expr}: {problem}" for problem in _call_problems(part))
    if grouped - labels:
        yield f"{expr}: no label {', '.join(sorted(grouped - labels))}"
    if lost := set(_LEGEND_LABEL.findall(legend)) - grouped:
        yield f"{expr}: its lines have no label {', '.join(sorted(lost))} for their name"


def _selectors(parts: list[Any]) -> Iterator[tuple[str, set[str]]]:
    for part in parts:
        selector = part.vector_selector if isinstance(part, promql_parser.MatrixSelector) else part
        if isinstance(selector, promql_parser.VectorSelector):
            yield str(selector.name), {matcher.name for matcher in selector.matchers.matchers}


def _call_problems(call: Any) -> Iterator[str]:
    if call.func.name == "histogram_quantile":
        buckets = call.args[1]
        if "le" not in buckets.modifier.labels:
            yield "the buckets of a quantile lose le"
    elif call.func.name in ("rate", "increase"):
        name = call.args[0].vector_selector.name
        if not name.endswith(("_total", "_bucket", "_sum", "_count")):
            yield f"{call.func.name} of {name}, which is no counter"


def _page_problems(page: Dashboard) -> Iterator[str]:
    for panel in page.panels:
        if panel.unit not in _UNITS:
            yield f"{panel.title}: no unit {panel.unit}"
        for query in panel.queries:
            yield from (f"{panel.title}: {problem}" for problem in query_problems(query.expr, query.legend))
    board = page.json()
    if not 0 < len(page.uid) <= _MAX_UID:
        yield f"uid has {len(page.uid)} characters, Grafana allows {_MAX_UID}"
    ids = [panel["id"] for panel in board["panels"]]
    if ids != list(range(1, len(ids) + 1)):
        yield "ids of panels are not 1, 2, ..."
    yield from _overlaps(board)
    for panel in board["panels"]:
        if panel["type"] != "row" and panel["datasource"] != DATASOURCE:
            yield f"{panel['title']}: its data source is no variable"


def _overlaps(board: Mapping[str, Any]) -> Iterator[str]:
    taken: dict[tuple[int, int], str] = {}
    for panel in board["panels"]:
        place = panel["gridPos"]
        if place["x"] + place["w"] > COLUMNS:
            yield f"{panel['title']}: it exceeds the {COLUMNS} columns"
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                other = taken.setdefault((x, y), panel["title"])
                if other is not panel["title"]:
                    yield f"{panel['title']}: it covers {other}"
