"""How the engine benchmark shows and keeps its figures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.peers.catalogue import CATALOGUE, default_root
from cluster.figures.machine import facts
from cluster.plan.devices import Roofs

Row = dict[str, object]


def print_table(console: Console, rows: Sequence[Row], roofs: Roofs) -> None:
    """The rows with the ceilings above."""
    table = Table(
        title=f"ceilings: read {roofs.read_bytes_per_s / 1e9:.1f} GB/s, "
        f"bf16 products {roofs.flop_per_s / 1e9:.0f} Gflop/s"
    )
    for heading in ("work", "unit", "tandem", "best peer", "peer", "ratio", "limit", "share of limit"):
        table.add_column(heading, justify="left" if heading in ("work", "unit", "peer") else "right")
    keys = ("work", "unit", "ours", "best_peer", "peer", "ratio_to_best_peer", "limit", "limit_share")
    for row in rows:
        table.add_row(*(str(row[key]) for key in keys))
    console.print(table)


def record(
    path: Path,
    rows: Sequence[Row],
    samples: Mapping[str, object],
    roof_samples: Mapping[str, Sequence[float]],
    settings: Mapping[str, object],
) -> None:
    """Everything needed to read the figures again: commit, machine, versions, settings, every sample."""
    root = default_root()
    content = {
        "rows": rows,
        "samples": samples,  # of each weight format: of each work, subject -> pairs of seconds
        "roof_samples": roof_samples,
        "settings": settings,
        "machine": {
            **facts(),
            "peers": {
                name: kind.stamp(root).read_text()
                for name, kind in CATALOGUE.items()
                if kind.is_installed(root)
            },
        },
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
