"""A dashboard in Grafana's JSON (classic schema, as Grafana 11 to 13 import it).

Panels name the data source and the model by variables, so a file fits any Grafana with a Prometheus.
"""

from __future__ import annotations

import string
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

SCHEMA_VERSION = 39
COLUMNS = 24  # width of Grafana's grid
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
REF_IDS = string.ascii_uppercase


@dataclass(frozen=True, slots=True)
class Query:
    """PromQL and the name of its lines; `{{label}}` in the name stands for a label's value."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel: a number (`stat`) or lines over time (`timeseries`)."""

    title: str
    description: str
    unit: str  # Grafana's: short, s, percentunit, reqps, ...
    queries: tuple[Query, ...]
    kind: str = "timeseries"
    width: int = 8  # of COLUMNS
    is_stacked: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """Panels of one height under a heading."""

    title: str
    height: int
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    """A page."""

    uid: str
    title: str
    tags: tuple[str, ...]
    models: str  # the PromQL series whose label `model` fills the variable of that name
    rows: tuple[Row, ...]

    def json(self) -> dict[str, Any]:
        """As Grafana imports it."""
        return {
            "uid": self.uid,
            "title": self.title,
            "tags": list(self.tags),
            "schemaVersion": SCHEMA_VERSION,
            "version": 1,
            "editable": True,
            "graphTooltip": 1,
            "timezone": "browser",
            "refresh": "10s",
            "time": {"from": "now-30m", "to": "now"},
            "annotations": {"list": []},
            "links": [],
            "templating": {"list": [_datasource_variable(), _model_variable(self.models)]},
            "panels": list(_panels(self.rows)),
        }


def _datasource_variable() -> dict[str, Any]:
    return {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "current": {},
        "hide": 0,
        "includeAll": False,
        "multi": False,
        "options": [],
        "refresh": 1,
        "regex": "",
    }


def _model_variable(series: str) -> dict[str, Any]:
    query = f"label_values({series}, model)"
    return {
        "name": "model",
        "label": "Model",
        "type": "query",
        "datasource": DATASOURCE,
        "definition": query,
        "query": {"query": query, "refId": "Models"},
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
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": DATASOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": _defaults(panel), "overrides": []},
        "options": _stat_options() if panel.kind == "stat" else _lines_options(),
        "targets": [
            {
                "refId": ref_id,
                "datasource": DATASOURCE,
                "editorMode": "code",
                "expr": query.expr,
                "legendFormat": query.legend or "__auto",
                "range": True,
            }
            for ref_id, query in zip(REF_IDS, panel.queries, strict=False)
        ],
    }


def _defaults(panel: Panel) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.kind == "timeseries":
        defaults["custom"] = {
            "drawStyle": "line",
            "lineWidth": 1,
            "fillOpacity": 30 if panel.is_stacked else 5,
            "showPoints": "never",
            "stacking": {"mode": "normal" if panel.is_stacked else "none", "group": "A"},
        }
    return defaults


def _stat_options() -> dict[str, Any]:
    reduce = {"calcs": ["lastNotNull"], "fields": "", "values": False}
    return {"reduceOptions": reduce, "colorMode": "value", "graphMode": "area", "textMode": "auto"}


def _lines_options() -> dict[str, Any]:
    return {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
