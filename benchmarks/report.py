"""How the engine benchmark shows and keeps its figures."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.table import Table

from benchmarks.peers.catalogue import CATALOGUE, default_root
from benchmarks.works import Roofs

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
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10)
    root = default_root()
    content = {
        "rows": rows,
        "samples": samples,  # of each weight format: of each work, subject -> pairs of seconds
        "roof_samples": roof_samples,
        "settings": settings,
        "commit": commit.stdout.strip() or "unknown",
        "machine": {
            "cpu": _cpu_model(),
            "cores": len(os.sched_getaffinity(0)),
            "load_15_min": os.getloadavg()[2],  # far above our threads: others ran beside us
            "platform": platform.platform(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "peers": {
                name: kind.stamp(root).read_text()
                for name, kind in CATALOGUE.items()
                if kind.is_installed(root)
            },
        },
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
