"""The file of a benchmark: rows, raw samples, what was asked for, and where it was measured."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.figures.machine import facts

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One run of one benchmark."""

    kind: str  # sweep, serve, replay, kv-cache, calibrate
    rows: Sequence[Row]
    config: Mapping[str, Any]  # of what was measured: model, dtype, limits
    load: Mapping[str, Any]  # what it was given to do
    samples: Any  # every single measurement behind the rows
    ceilings: Mapping[str, Any]  # measured beside it; empty where nothing is known of the hardware

    def content(self) -> dict[str, Any]:
        """As plain data, with the facts of this machine."""
        return {
            "kind": self.kind,
            "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "machine": facts(),
            "config": dict(self.config),
            "load": dict(self.load),
            "ceilings": dict(self.ceilings),
            "rows": [dict(row) for row in self.rows],
            "samples": self.samples,
        }


def report_text(content: Mapping[str, Any]) -> str:
    """What `Report.content` gives, as JSON. Raises ValueError for numbers that JSON has no words for."""
    return json.dumps(content, indent=1, allow_nan=False) + "\n"
