"""A dashboard in Grafana's JSON (classic schema, as Grafana 11 to 13 import it).

Panels name the data source, the model and the groups by variables, so a file fits any Grafana with a
Prometheus.
"""

from __future__ import annotations

import string
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

SCHEMA_VERSION = 39
COLUMNS = 24  # width of Grafana's grid
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
REF_IDS = string.ascii_uppercase
TAG = "tandem"
_GREEN, _YELLOW, _RED = "green", "yellow", "red"


class Kind(Enum):
    """How a panel shows its series, by Grafana's names."""

    STAT = "stat"  # the last value as a number
    LINES = "timeseries"
    HEATMAP = "heatmap"  # of a histogram's buckets over time


@dataclass(frozen=True, slots=True)
class Query:
    """PromQL and the name of its lines; `{{label}}` in the name stands for a label's value."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel."""

    title: str
    description: str
    unit: str  # Grafana's: short, s, percentunit, reqps, ...
    queries: tuple[Query, ...]
    kind: Kind = Kind.LINES
    width: int = 8  # of COLUMNS
    is_stacked: bool = False
    thresholds: tuple[float, ...] = ()  # yellow from the first on, red from the second


@dataclass(frozen=True, slots=True)
class Row:
    """Panels of one height under a heading."""

    title: str
    height: int
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    """A page."""

    uid: str  # at most 40 characters; pushing finds it again by this
    title: str
    description: str
    models: str  # the series whose label `model` fills the variable of that name
    groups: str  # as well for `group`
    rows: tuple[Row, ...]

    @property
    def panels(self) -> tuple[Panel, ...]:
        """Those of all rows."""
        return tuple(panel for row in self.rows for panel in row.panels)

    def json(self) -> dict[str, Any]:
        """As Grafana imports it."""
        variables = [
            _datasource_variable(),
            _series_variable("model", "Model", self.models),
            _series_variable("group", "Group", self.groups + '{model=~"$model"}'),
        ]
        return {
            "uid": self.uid,
            "title": self.title,
            "description": self.description,
            "tags": [TAG],
            "schemaVersion": SCHEMA_VERSION,
            "version": 1,
            "editable": True,
            "graphTooltip": 1,
            "timezone": "browser",
            "refresh": "10s",
            "time": {"from": "now-30m", "to": "now"},
            "annotations": {"list": []},
            "links": [_pages_link("Tandem", TAG)],
            "templating": {"list": variables},
            "panels": list(_panels(self.rows)),
        }


def _pages_link(title: str, tag: str) -> dict[str, Any]:
    """A menu of the dashboards with a tag; time range and variables go along."""
    return {
        "type": "dashboards",
        "title": title,
        "tags": [tag],
        "asDropdown": True,
        "icon": "external link",
        "includeVars": True,
        "keepTime": True,
        "targetBlank": False,
        "tooltip": "",
        "url": "",
    }


def _datasource_variable() -> dict[str, Any]:
    return {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "current": {"selected": True, "text": "default", "value": "default"},
        "hide": 0,
        "includeAll": False,
        "multi": False,
        "options": [],
        "refresh": 1,
        "regex": "",
    }


def _series_variable(name: str, label: str, series: str) -> dict[str, Any]:
    query = f"label_values({series}, {name})"
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": label},
        "allValue": ".*",
        "current": {"selected": True, "text": "All", "value": "$__all"},
        "hide": 0,
        "includeAll": True,
        "multi": True,
        "options": [],
        "refresh": 2,  # when the time range changes
        "regex": "",
        "sort": 1,
    }


def _panels(rows: Iterable[Row]) -> Iterator[dict[str, Any]]:
    """Rows from top to bottom, panels from left to right, numbered from 1."""
    id, y = 1, 0
    for row in rows:
        place = {"x": 0, "y": y, "w": COLUMNS, "h": 1}
        yield {
            "id": id,
            "type": "row",
            "title": row.title,
            "collapsed": False,
            "gridPos": place,
            "panels": [],
        }
        id, y, x = id + 1, y + 1, 0
        for panel in row.panels:
            if x + panel.width > COLUMNS:
                x, y = 0, y + row.height
            yield _panel(panel, id, {"x": x, "y": y, "w": panel.width, "h": row.height})
            id, x = id + 1, x + panel.width
        y += row.height


def _panel(panel: Panel, id: int, place: dict[str, int]) -> dict[str, Any]:
    return {
        "id": id,
        "type": panel.kind.value,
        "title": panel.title,
        "description": panel.description,
        "datasource": DATASOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": _defaults(panel), "overrides": []},
        "options": _options(panel),
        "targets": [
            {
                "refId": ref_id,
                "datasource": DATASOURCE,
                "editorMode": "code",
                "expr": query.expr,
                "legendFormat": query.legend or "__auto",
                "format": "heatmap" if panel.kind is Kind.HEATMAP else "time_series",
                "range": True,
            }
            for ref_id, query in zip(REF_IDS, panel.queries, strict=False)
        ],
    }


def _defaults(panel: Panel) -> dict[str, Any]:
    if panel.kind is Kind.HEATMAP:
        return {"custom": {"scaleDistribution": {"type": "linear"}}}
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.thresholds:
        steps: list[dict[str, Any]] = [{"color": _GREEN, "value": None}]
        steps += [
            {"color": color, "value": value}
            for color, value in zip((_YELLOW, _RED), panel.thresholds, strict=False)
        ]
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
    if panel.kind is Kind.LINES:
        defaults["custom"] = {
            "drawStyle": "line",
            "lineWidth": 1,
            "fillOpacity": 30 if panel.is_stacked else 5,
            "showPoints": "never",
            "stacking": {"mode": "normal" if panel.is_stacked else "none", "group": "A"},
        }
    return defaults


def _options(panel: Panel) -> dict[str, Any]:
    if panel.kind is Kind.STAT:
        reduce = {"calcs": ["lastNotNull"], "fields": "", "values": False}
        return {"reduceOptions": reduce, "colorMode": "value", "graphMode": "area", "textMode": "auto"}
    if panel.kind is Kind.HEATMAP:
        return {
            "calculate": False,
            "cellGap": 1,
            "color": {"mode": "scheme", "scheme": "Oranges", "steps": 64},
            "legend": {"show": True},
            "tooltip": {"mode": "single", "yHistogram": False},
            "yAxis": {"axisPlacement": "left", "unit": panel.unit},
        }
    return {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
