"""Every page drawn from a running Prometheus as one HTML file, for people without Grafana.

The file holds its data and the chart library (uPlot, which Grafana draws with), and asks nothing of any
network. It is a preview: Grafana's own legends, thresholds and variables are not in it.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster.observe.answers import Answer, Range, ask_page, name_of
from cluster.observe.prometheus_api import Line, PrometheusApi, shown_url
from dashboards.grafana import Dashboard, Kind, Panel

_HERE = Path(__file__).parent
_UPLOT = _HERE / "uplot"
_MAX_LINES = 24  # of a panel; what exceeds them is said under it


def preview(api: PrometheusApi, pages: Iterable[Dashboard], times: Range) -> tuple[str, list[str]]:
    """The HTML, and titles of panels that have nothing to show. Raises ObserveError."""
    drawn, empty = [], []
    for page in pages:
        titles = {id(panel): row.title for row in page.rows for panel in row.panels[:1]}
        panels = []
        for panel, answers in ask_page(api, page, times):
            panels.append({"row": titles.get(id(panel)), **_panel(panel, answers, times)})
            if all(answer.problem for answer in answers):
                empty.append(f"{page.title}: {panel.title}")
        drawn.append({"title": page.title, "text": page.description, "uid": page.uid, "panels": panels})
    return _document(
        {"start": times.start, "end": times.end, "source": shown_url(api.url), "pages": drawn}
    ), empty


def _panel(panel: Panel, answers: Sequence[Answer], times: Range) -> dict[str, Any]:
    lines = [(name_of(answer.query, line), line) for answer in answers for line in answer.lines]
    if panel.kind is Kind.HEATMAP:
        lines.sort(key=lambda named: _bound(named[1]))
    num_steps = round((times.end - times.start) / times.step_s) + 1
    series = [
        {"name": name, "values": _on_grid(line.values, times, num_steps)} for name, line in lines[:_MAX_LINES]
    ]
    return {
        "title": panel.title,
        "text": panel.description,
        "kind": panel.kind.value,
        "unit": panel.unit,
        "width": panel.width,
        "stacked": panel.is_stacked,
        "thresholds": list(panel.thresholds),
        "step": times.step_s,
        "series": series,
        "left": max(0, len(lines) - _MAX_LINES),
    }


def _bound(line: Line) -> float:
    """Upper bound of a histogram's bucket; the last where it says none."""
    try:
        return float(line.labels.get("le", "inf"))
    except ValueError:
        return math.inf


def _on_grid(values: Sequence[tuple[float, float]], times: Range, num_steps: int) -> list[float | None]:
    """Values by step; None where there is none. Numbers of four digits: pages stay small."""
    grid: list[float | None] = [None] * num_steps
    for time, value in values:
        step = round((time - times.start) / times.step_s)
        if 0 <= step < num_steps and math.isfinite(value):
            grid[step] = float(f"{value:.4g}")
    return grid


def _document(data: Mapping[str, Any]) -> str:
    # "<" would end the script element within a string.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    parts = {
        "TITLE": html.escape("Tandem: preview of the dashboards"),
        "UPLOT_CSS": (_UPLOT / "uplot-1.6.32.min.css").read_text(encoding="utf-8"),
        "UPLOT_JS": (_UPLOT / "uplot-1.6.32.min.js").read_text(encoding="utf-8"),
        "LICENCE": html.escape((_UPLOT / "LICENSE.txt").read_text(encoding="utf-8")),
        "DRAW_JS": (_HERE / "preview.js").read_text(encoding="utf-8"),
        "DATA": text,
    }
    page = (_HERE / "preview.html").read_text(encoding="utf-8")
    for name, part in parts.items():
        page = page.replace(f"@@{name}@@", part, 1)
    return page
