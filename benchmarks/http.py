"""The whole path, HTTP to engine, against the engine alone in the same run; CPU time of every process.

    python -m benchmarks.http [--streams 1,8,32,64] [--runs N] [--json]

Starts `tandem serve` on a free port, then in turn for every number of streams: that many streaming
completions at once (random prompts of 128 tokens, 64 new) through HTTP, and the same works in the offline
engine of this process. Both figures are all new tokens over the seconds from the first byte sent to the last
token. CPU microseconds a token include what a process does when idle. The last line of output is JSON: rows
with all samples, machine and commit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.request import urlopen

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.client import complete
from benchmarks.cpu_time import cpu_seconds, mark_of_child
from benchmarks.subjects import Tandem
from cluster.figures.machine import facts
from cluster.figures.percentile import percentile
from cluster.launch.ports import free_port
from cluster.models.embedded import ensure
from workers.model.checkpoint import Checkpoint
from workers.model.spec import spec_from_config

PROMPT_TOKENS = 128
NEW_TOKENS = 64
_START_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 60.0
_ANSWER_TIMEOUT_S = 300.0

Row = dict[str, Any]  # of the JSON line


@dataclass(slots=True)
class Samples:
    """What one number of streams took, over the runs."""

    http: list[float] = field(default_factory=list)  # tokens a second
    engine: list[float] = field(default_factory=list)
    first_event_s: list[float] = field(default_factory=list)  # of every stream
    cpu_s: dict[str, float] = field(default_factory=dict)  # by process
    tokens: int = 0


@contextmanager
def serving(port: int, *arguments: str) -> Iterator[str]:
    """A `tandem serve` of the embedded model, or of what the arguments say; gives the mark of its
    processes."""
    program = "from cluster.cli import main; main()"  # the console script may be of another checkout
    command = [sys.executable, "-c", program, "serve", *arguments, "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True) as process:
        try:
            _wait_ready(process, port)
            mark = mark_of_child(process.pid)
            assert mark is not None, "a cluster that serves has processes"
            yield mark
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait_ready(process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"tandem serve ended with code {process.returncode}; it said why above")
        try:
            with urlopen(f"http://127.0.0.1:{port}/ready", timeout=5) as answer:
                if answer.status == 200:
                    return
        except OSError:  # nobody listens yet, or it is not ready
            pass
        time.sleep(0.5)
    raise RuntimeError(f"tandem serve was not ready within {_START_TIMEOUT_S:g} s")


async def stream(port: int, prompt: Sequence[int]) -> float:
    """One streaming completion over a connection of its own; seconds to its first event."""
    body = {
        "prompt": list(prompt),
        "max_tokens": NEW_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started = time.perf_counter()
    first_s = 0.0
    received: list[bytes] = []

    def take(piece: bytes) -> None:
        nonlocal first_s
        if not first_s and b"data: " in piece:
            first_s = time.perf_counter() - started
        received.append(piece)

    await complete(port, body, take, timeout_s=_ANSWER_TIMEOUT_S)
    answer = b"".join(received)
    if b"data: [DONE]" not in answer or f'"completion_tokens":{NEW_TOKENS}'.encode() not in answer:
        raise RuntimeError(f"a stream did not bring {NEW_TOKENS} tokens; it ends {answer[-300:]!r}")
    return first_s


async def all_streams(port: int, prompts: Sequence[Sequence[int]]) -> tuple[float, list[float]]:
    """Seconds until all have ended; seconds to each one's first event."""
    started = time.perf_counter()
    firsts = await asyncio.gather(*(stream(port, prompt) for prompt in prompts))
    return time.perf_counter() - started, list(firsts)


def measure(port: int, mark: str, engine: Tandem, prompts: list[list[list[int]]], samples: Samples) -> None:
    """One run of both; `prompts` holds one list for HTTP and another for the engine."""
    through_http, alone = prompts
    before = cpu_seconds(mark)
    seconds, firsts = asyncio.run(all_streams(port, through_http))
    for name, seconds_now in cpu_seconds(mark).items():
        used = seconds_now - before.get(name, 0.0)
        samples.cpu_s[name] = samples.cpu_s.get(name, 0.0) + used
    tokens = len(through_http) * NEW_TOKENS
    samples.tokens += tokens
    samples.http.append(tokens / seconds)
    samples.first_event_s += firsts
    samples.engine.append(tokens / engine.generate(alone, NEW_TOKENS))


def row_of(streams: int, samples: Samples) -> Row:
    """Medians, and CPU microseconds a token and process."""
    http, engine = statistics.median(samples.http), statistics.median(samples.engine)
    firsts = samples.first_event_s
    return {
        "streams": streams,
        "http_tokens_per_s": round(http, 1),
        "engine_tokens_per_s": round(engine, 1),
        "share_of_engine": round(http / engine, 3),
        "first_event_p50_ms": round(statistics.median(firsts) * 1e3, 1),
        "first_event_p99_ms": round(percentile(firsts, 99) * 1e3, 1),
        "cpu_us_per_token": {
            name: round(seconds / samples.tokens * 1e6, 1) for name, seconds in sorted(samples.cpu_s.items())
        },
        "samples": {"http": samples.http, "engine": samples.engine},
    }


def print_tables(rows: Sequence[Row]) -> None:
    """Rates and times; below, CPU microseconds a token of every process."""
    rates = Table(title=f"prompts of {PROMPT_TOKENS}, {NEW_TOKENS} new tokens")
    keys = [key for key in rows[0] if key not in ("samples", "cpu_us_per_token")]
    for heading in keys:
        rates.add_column(heading.replace("_", " "), justify="right")
    names = sorted({name for row in rows for name in row["cpu_us_per_token"]})
    costs = Table(title="CPU microseconds a token")
    for heading in ("streams", *names):
        costs.add_column(heading, justify="right")
    for row in rows:
        rates.add_row(*(str(row[key]) for key in keys))
        costs.add_row(str(row["streams"]), *(str(row["cpu_us_per_token"].get(name, "")) for name in names))
    console = Console()
    console.print(rates)
    console.print(costs)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.http", description=__doc__.split("\n")[0])
    parser.add_argument("--streams", default="1,8,32,64", help="at once; default: %(default)s")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="no table on stdout, only the JSON line")
    options = parser.parse_args()
    counts = [int(text) for text in options.streams.split(",")]
    folder = ensure(Console(stderr=True).print)
    vocab_size = spec_from_config(Checkpoint(folder).config).vocab_size
    random = torch.Generator().manual_seed(0)
    threads = len(os.sched_getaffinity(0))
    samples = {count: Samples() for count in counts}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the cluster is stopped
    port = free_port()
    with serving(port) as mark, closing(Tandem(folder, threads, max_running=128)) as engine:
        for run in range(-1, options.runs):  # the first is for warming up
            for count in counts:
                shape = (2, count, PROMPT_TOKENS)
                prompts: list[list[list[int]]] = torch.randint(
                    10, vocab_size, shape, generator=random
                ).tolist()
                found = samples[count] if run >= 0 else Samples()
                measure(port, mark, engine, prompts, found)
                name = f"run {run + 1} of {options.runs}" if run >= 0 else "warming up"
                line = f"{found.http[-1]:.1f} tok/s, engine alone {found.engine[-1]:.1f}"
                print(f"{name}: {count} streams: {line}", file=sys.stderr, flush=True)
    rows = [row_of(count, samples[count]) for count in counts]
    if not options.json:
        print_tables(rows)
    print(json.dumps({"rows": rows, "runs": options.runs, "machine": facts()}))


if __name__ == "__main__":
    main()
