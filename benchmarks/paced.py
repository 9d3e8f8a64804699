"""What router and proxy cost: CPU microseconds a streamed token and a request, at a pace of the clock.

    python -m benchmarks.paced [--streams 64] [--seconds 10] [--runs N] [--json]

Serves `benchmarks.paced_app`: every stream gets a token each 20 ms. Three windows a run: nothing to do; all
streams running, none beginning or ending inside; streams of one token one after the other (`requests`, twice
as many as streams at once). Idle CPU is taken off both. CPU time, not wall time: other programs on the
machine disturb it little. The last line of output is JSON: rows with all samples, machine and commit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.client import complete
from benchmarks.cpu_time import cpu_seconds
from benchmarks.paced_app import PERIOD_S
from cluster.figures.machine import facts
from cluster.launch.handover import deploy, wait_ready
from cluster.launch.local_cluster import LocalCluster, start_local_cluster, stop_all
from cluster.launch.ports import free_port

PROMPT_TOKENS = 128
_APPLICATION = "tandem"
_SETTLE_S = 1.0
_TIMEOUT_S = 120.0

Costs = dict[str, list[float]]  # process -> microseconds, one of each run


@contextmanager
def serving(port: int) -> Iterator[LocalCluster]:
    """A cluster of its own that serves the paced application."""

    def report(news: str) -> None:
        print(news, file=sys.stderr, flush=True)

    cluster = start_local_cluster(dashboard_port=free_port(), report=report)
    try:
        tree = {
            "proxy_location": "HeadOnly",
            "http_options": {"host": "127.0.0.1", "port": port},
            "applications": [
                {"name": _APPLICATION, "route_prefix": "/", "import_path": "benchmarks.paced_app:build"}
            ],
        }
        deploy(cluster.api, tree, report=report)
        wait_ready(cluster.api, application=_APPLICATION, url=f"http://127.0.0.1:{port}", report=report)
        yield cluster
    finally:
        stop_all(cluster)


async def stream(port: int, new_tokens: int, begun: asyncio.Event | None = None) -> None:
    """One streaming completion over a connection of its own; `begun` is set at its first event."""
    body = {"prompt": list(range(100, 100 + PROMPT_TOKENS)), "max_tokens": new_tokens, "stream": True}
    end = b""

    def take(piece: bytes) -> None:
        nonlocal end
        end = (end + piece)[-400:]
        if begun is not None and b"data: " in piece:
            begun.set()

    await complete(port, body, take, timeout_s=_TIMEOUT_S)
    if b"data: [DONE]" not in end:
        raise RuntimeError(f"a stream did not end well: {end!r}")


async def running(port: int, mark: str, streams: int, seconds: float) -> dict[str, float]:
    """CPU seconds by process in a window in which all streams run."""
    tokens = int((seconds + 2 * _SETTLE_S) / PERIOD_S) + 250
    events = [asyncio.Event() for _ in range(streams)]
    tasks = [asyncio.create_task(stream(port, tokens, event)) for event in events]
    await asyncio.gather(*(event.wait() for event in events))
    await asyncio.sleep(_SETTLE_S)
    before = cpu_seconds(mark)
    await asyncio.sleep(seconds)
    used = _difference(cpu_seconds(mark), before)
    if any(task.done() for task in tasks):
        raise RuntimeError("a stream ended inside the window: the machine is too busy")
    await asyncio.gather(*tasks)
    return used


async def short_requests(port: int, streams: int) -> None:
    """Requests of one token, as many at once as there are streams."""

    async def one_after_the_other() -> None:
        for _ in range(2):
            await stream(port, 1)

    await asyncio.gather(*(one_after_the_other() for _ in range(streams)))


def _difference(after: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    return {name: seconds - before.get(name, 0.0) for name, seconds in after.items()}


def measure(port: int, mark: str, streams: int, seconds: float, tokens: Costs, requests: Costs) -> None:
    """One run into the two tables."""
    before = cpu_seconds(mark)
    time.sleep(seconds)
    idle = {name: used / seconds for name, used in _difference(cpu_seconds(mark), before).items()}
    used = asyncio.run(running(port, mark, streams, seconds))
    num_tokens = streams * seconds / PERIOD_S
    for name, cpu_s in used.items():
        extra_s = cpu_s - idle.get(name, 0.0) * seconds
        tokens.setdefault(name, []).append(extra_s / num_tokens * 1e6)
    before, started = cpu_seconds(mark), time.monotonic()
    asyncio.run(short_requests(port, streams))
    took_s = time.monotonic() - started
    for name, cpu_s in _difference(cpu_seconds(mark), before).items():
        extra_s = cpu_s - idle.get(name, 0.0) * took_s
        requests.setdefault(name, []).append(extra_s / (2 * streams) * 1e6)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.paced", description=__doc__.split("\n")[0])
    parser.add_argument("--streams", type=int, default=64, help="at once; default: %(default)s")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of a window")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="no table on stdout, only the JSON line")
    options = parser.parse_args()
    tokens: Costs = {}
    requests: Costs = {}
    port = free_port()
    with serving(port) as cluster:
        measure(port, cluster.mark, options.streams, 2.0, {}, {})  # warming up
        for _ in range(options.runs):
            measure(port, cluster.mark, options.streams, options.seconds, tokens, requests)
    rows: list[dict[str, Any]] = [
        {
            "process": name,
            "us_per_token": round(statistics.median(tokens[name]), 1),
            "us_per_request": round(statistics.median(requests.get(name, [0.0])), 0),
            "samples": {"token": tokens[name], "request": requests.get(name, [])},
        }
        for name in sorted(tokens)
    ]
    if not options.json:
        table = Table(
            title=f"CPU, {options.streams} streams, a token each {PERIOD_S * 1e3:g} ms, without idle"
        )
        for heading in ("process", "us a token", "us a request"):
            table.add_column(heading, justify="right")
        for row in rows:
            table.add_row(row["process"], str(row["us_per_token"]), str(row["us_per_request"]))
        Console().print(table)
    settings = {"streams": options.streams, "seconds": options.seconds, "period_ms": PERIOD_S * 1e3}
    print(json.dumps({"rows": rows, **settings, "machine": facts()}))


if __name__ == "__main__":
    main()
