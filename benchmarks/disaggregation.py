"""What it brings that groups read each other's KV blocks: two experiments on two cores, whole engines.

    python -m benchmarks.disaggregation --model FOLDER [--runs N] [--only pull|interference] [--output FILE]

pull: a neighbour has the first 1,920 tokens of a prompt of 1,960. Time to the first token of a group on its
own core that reads them, by memory or by sockets, beside the same group computing them.

interference: 8 streams run while prompts of 2,048 tokens arrive, each for 16 tokens. Two groups of one core,
one for prompts and one that answers, beside one group of both cores, with its default step and with smaller
chunks of prompts. Gaps between the tokens of the streams, time to the first token of the arrivals, and
goodput: tokens of streams that came within --gap-ms of the one before, and arrivals whose first token came
within --first-s.

Every run measures all subjects, one after the other. The last line of output is JSON; --output keeps every
sample.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import secrets
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager, closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.groups import Group, GroupPlan, Run, through
from benchmarks.spin import spin_briefly
from cluster.figures.machine import facts
from cluster.figures.percentile import percentile

PREFIX_TOKENS, SUFFIX_TOKENS = 1920, 40
NUM_STREAMS, STREAM_PROMPT = 8, 128
ARRIVAL_TOKENS, ARRIVAL_OUTPUT = 2048, 16
CHUNKS = (64, 128, 256)
NUM_BLOCKS = 1600
_BEGIN_S = 60.0  # for all streams to run
_SETTLE_S = 0.5  # for the step that runs when streams are aborted

Row = dict[str, object]


def tokens(count: int) -> list[int]:
    return [random.randrange(10, 40_000) for _ in range(count)]


async def measure_pull(groups: dict[str, Group], runs: int) -> dict[str, list[float]]:
    """Seconds to the first token, by subject."""
    neighbour = groups["neighbour"]
    found: dict[str, list[float]] = {"compute": [], "memory": [], "sockets": []}
    for run in range(runs + 1):
        prefix, expected = tokens(PREFIX_TOKENS), None
        for subject, seconds in found.items():
            salt = secrets.token_hex(4)
            reader = groups["sockets" if subject == "sockets" else "memory"]
            await neighbour.finish(prefix, 0, salt=salt)
            source = neighbour.source() if subject != "compute" else None
            prompt = prefix + [11] * SUFFIX_TOKENS
            done = await reader.finish(prompt, 4, salt=salt, source=source)
            if (done.num_cached > 0) != (source is not None):
                raise RuntimeError(f"{subject}: {done.num_cached} tokens were not computed")
            expected = expected or done.token_ids
            if done.token_ids != expected:
                raise RuntimeError(f"{subject}: tokens {done.token_ids}, not {expected}")
            if run:  # the first warms
                seconds.append(done.first_s)
    return found


class Interference:
    """Streams and arrivals of one measurement."""

    def __init__(self, prefill: Group, decode: Group) -> None:
        """The same group twice: one group for all."""
        self._prefill, self._decode = prefill, decode

    async def run(self, seconds: float, period_s: float) -> tuple[list[list[float]], list[float]]:
        """Gaps of each stream, and times to the first token of each arrival, within the window."""
        salt = secrets.token_hex(4)
        streams = [self._decode.send(tokens(STREAM_PROMPT), 2000, salt=salt) for _ in range(NUM_STREAMS)]
        async with asyncio.timeout(_BEGIN_S):
            while min(len(run.token_s) for _, run in streams) < 8:
                if failed := [run.error for _, run in streams if run.error is not None]:
                    raise RuntimeError(f"a stream did not begin: {failed[0]}")
                await asyncio.sleep(0.01)
        began_s = time.perf_counter()
        arrivals = []
        for number in range(int(seconds / period_s)):
            await asyncio.sleep(max(0.0, began_s + number * period_s - time.perf_counter()))
            arrivals.append(asyncio.create_task(self._arrive(salt)))
        done = await asyncio.gather(*arrivals)
        ended_s = time.perf_counter()
        for request_id, run in streams:
            if run.error is not None or run.is_over.is_set():
                raise RuntimeError(f"a stream ended: {run.error}")
            self._decode.abort(request_id)
        await asyncio.sleep(_SETTLE_S)
        gaps = [
            [later - earlier for earlier, later in pairwise(run.token_s) if began_s <= later <= ended_s]
            for _, run in streams
        ]
        return gaps, [run.first_s for run in done]

    async def _arrive(self, salt: str) -> Run:
        prompt = tokens(ARRIVAL_TOKENS)
        if self._prefill is self._decode:
            return await self._decode.finish(prompt, ARRIVAL_OUTPUT, salt=salt)
        return await through(self._prefill, self._decode, prompt, ARRIVAL_OUTPUT, salt)


def interference_row(
    subject: str, samples: list[tuple[list[list[float]], list[float]]], gap_s: float, first_s: float
) -> Row:
    gaps = [gap for streams, _ in samples for stream in streams for gap in stream]
    firsts = [first for _, arrivals in samples for first in arrivals]
    window_s = sum(sum(streams[0]) for streams, _ in samples)
    return {
        "subject": subject,
        "gap_p50_ms": round(1e3 * statistics.median(gaps), 1),
        "gap_p99_ms": round(1e3 * percentile(gaps, 99), 1),
        "gap_max_ms": round(1e3 * max(gaps), 1),
        "first_p50_s": round(statistics.median(firsts), 2),
        "first_p99_s": round(percentile(firsts, 99), 2),
        "stream_tokens_per_s": round(len(gaps) / window_s, 1),
        "good_tokens_per_s": round(sum(gap <= gap_s for gap in gaps) / window_s, 1),
        "good_arrivals": round(sum(first <= first_s for first in firsts) / len(firsts), 2),
    }


def plan(options: argparse.Namespace, name: str, *cores: int) -> GroupPlan:
    return GroupPlan(
        name=name, model=str(options.model), cores=cores, secret=options.secret, num_blocks=NUM_BLOCKS
    )


@asynccontextmanager
async def started(plans: Sequence[GroupPlan]) -> AsyncIterator[dict[str, Group]]:
    """Groups that serve, by name; none of them outlives the block, nor one that does not start."""
    with ExitStack() as stack:
        groups = {plan.name: stack.enter_context(closing(Group(plan))) for plan in plans}
        for group in groups.values():
            await group.connect()
        yield groups


async def pull_experiment(options: argparse.Namespace) -> tuple[list[Row], object]:
    first, second, *_ = sorted(os.sched_getaffinity(0))
    plans = [
        plan(options, "neighbour", first),
        replace(plan(options, "memory", second), transport="memory"),
        replace(plan(options, "sockets", second), transport="sockets"),
    ]
    async with started(plans) as groups:
        found = await measure_pull(groups, options.runs)
    rows: list[Row] = []
    for subject, seconds in found.items():
        ratios = [computed / pulled for computed, pulled in zip(found["compute"], seconds, strict=True)]
        rows.append(
            {
                "subject": subject,
                "first_ms": round(1e3 * statistics.median(seconds), 1),
                "times_faster_than_compute": round(statistics.median(ratios), 2),
            }
        )
    return rows, found


async def interference_experiment(options: argparse.Namespace) -> tuple[list[Row], object]:
    first, second, *_ = sorted(os.sched_getaffinity(0))
    plans = [
        plan(options, "prefill", first),
        plan(options, "decode", second),
        plan(options, "unified", first, second),
        *[
            replace(plan(options, f"unified, {chunk}", first, second), max_prefill_chunk=chunk)
            for chunk in CHUNKS
        ],
    ]
    async with started(plans) as groups:
        subjects = {"prefill + decode": Interference(groups["prefill"], groups["decode"])}
        for name, group in groups.items():
            if name.startswith("unified"):
                subjects[name] = Interference(group, group)
        samples: dict[str, list[tuple[list[list[float]], list[float]]]] = {name: [] for name in subjects}
        for run in range(options.runs):
            for name, subject in subjects.items():
                samples[name].append(await subject.run(options.seconds, options.period_s))
                row = interference_row(name, samples[name][-1:], options.gap_ms / 1e3, options.first_s)
                print(f"run {run + 1}: {row}", flush=True)
    rows = [interference_row(name, of, options.gap_ms / 1e3, options.first_s) for name, of in samples.items()]
    return rows, samples


def show(title: str, rows: Sequence[Row]) -> None:
    table = Table(title=title)
    for heading in rows[0]:
        table.add_column(heading, justify="left" if heading == "subject" else "right")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.disaggregation")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--only", choices=("pull", "interference"))
    parser.add_argument("--seconds", type=float, default=16.0, help="of arrivals, each measurement")
    parser.add_argument("--period-s", type=float, default=4.0, help="between two arrivals")
    parser.add_argument("--gap-ms", type=float, default=50.0)
    parser.add_argument("--first-s", type=float, default=5.0)
    parser.add_argument("--output", type=Path, help="where all samples go, as JSON")
    options = parser.parse_args()
    options.secret = secrets.token_hex(32)
    content: dict[str, object] = {
        "machine": facts(),
        "settings": {name: str(value) for name, value in vars(options).items() if name != "secret"},
    }
    rows: dict[str, list[Row]] = {}
    if options.only != "interference":
        rows["pull"], content["pull"] = asyncio.run(pull_experiment(options))
        show(f"first token of {PREFIX_TOKENS + SUFFIX_TOKENS} tokens", rows["pull"])
    if options.only != "pull":
        rows["interference"], content["interference"] = asyncio.run(interference_experiment(options))
        show(f"{NUM_STREAMS} streams while prompts of {ARRIVAL_TOKENS} arrive", rows["interference"])
    if options.output is not None:
        options.output.write_text(json.dumps({"rows": rows, **content}) + "\n")
    print(json.dumps(rows))


if __name__ == "__main__":
    spin_briefly()
    main()
