"""`python -m cluster.bench.chart FILE`: draws the report on standard input. Needs matplotlib."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

_SIZE = (11.0, 4.2)  # inches
_DPI = 110


def main() -> int:
    content: Mapping[str, Any] = json.load(sys.stdin)
    figure = Figure(figsize=_SIZE, layout="constrained")
    FigureCanvasAgg(figure)
    if content["kind"] == "sweep":
        _sweep(figure, content)
    elif content["kind"] == "kv-cache":
        _kv_cache(figure, content)
    else:
        print(f"a report of kind {content['kind']!r} has no picture", file=sys.stderr)
        return 1
    figure.savefig(sys.argv[1], dpi=_DPI)
    return 0


def _sweep(figure: Figure, content: Mapping[str, Any]) -> None:
    """Throughput against its limit, and what it costs in latency."""
    rows, load = content["rows"], content["load"]
    batches = [row["batch"] for row in rows]
    left, right = figure.subplots(1, 2)
    left.plot(batches, [row["decode_limit_tokens_per_s"] for row in rows], "k--", label="roofline, decode")
    left.plot(batches, [row["decode_tokens_per_s"] for row in rows], "o-", label="decode")
    left.plot(batches, [row["throughput_tokens_per_s"] for row in rows], "s-", label="with prompts")
    left.set_yscale("log")
    left.set_ylabel("tokens a second")
    right.plot(batches, [row["latency_s"] for row in rows], "o-", label="latency, s")
    right.plot(batches, [row["ttft_ms"] / 1e3 for row in rows], "s-", label="TTFT, s")
    right.plot(batches, [row["tpot_ms"] / 1e3 for row in rows], "^-", label="TPOT, s")
    right.set_yscale("log")
    for axes in (left, right):
        _batches(axes, batches)
        for row in rows:
            if row["is_knee"]:
                axes.axvline(row["batch"], color="tab:red", linestyle=":", label="knee")
        axes.legend()
    figure.suptitle(f"{_model(content)}: prompts of {load['prompt_tokens']}, {load['new_tokens']} new tokens")


def _kv_cache(figure: Figure, content: Mapping[str, Any]) -> None:
    """Time since the first token, with and without."""
    axes = figure.subplots()
    for name, label in (
        ("without_cache_s", "everything computed anew"),
        ("with_cache_s", "with the KV cache"),
    ):
        seconds = content["samples"][name]
        axes.plot(range(1, len(seconds) + 1), seconds, label=label)
    axes.set_xlabel("tokens generated")
    axes.set_ylabel("seconds")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.suptitle(f"{_model(content)}: one prompt of {content['load']['prompt_tokens']} tokens")


def _batches(axes: Axes, batches: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.set_xlabel("batch")
    axes.grid(alpha=0.3)


def _model(content: Mapping[str, Any]) -> str:
    return str(content["config"]["model"]).rstrip("/").rpartition("/")[2]


if __name__ == "__main__":
    sys.exit(main())
