"""Writes every dashboard's JSON beside this file."""

from __future__ import annotations

import json
from pathlib import Path

from dashboards.grafana import Dashboard
from dashboards.overview import OVERVIEW

FILES = {"overview.json": OVERVIEW}


def text_of(dashboard: Dashboard) -> str:
    """The content of a dashboard's file."""
    return json.dumps(dashboard.json(), indent=1) + "\n"


if __name__ == "__main__":
    for name, dashboard in FILES.items():
        (Path(__file__).parent / name).write_text(text_of(dashboard), encoding="utf-8")
