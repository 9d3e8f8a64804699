"""A row of the table of metrics."""

from __future__ import annotations

from dataclasses import dataclass

PREFIX = "tandem_"


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One row of the table. Labels `model` and `replica` (of a group: `group`) come first on every series."""

    name: str  # without prefix, and without _total
    help: str
    labels: tuple[str, ...] = ()  # its own; a series has their values in one text, with spaces between
    buckets: tuple[float, ...] = ()  # seconds, of histograms
