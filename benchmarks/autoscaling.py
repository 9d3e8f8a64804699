"""A burst at real speed against deploy/local-autoscaled.yaml: sizes of the pool over time, why, and what
requests saw.

    python -m benchmarks.autoscaling [--burst-s 90] [--share 1.3] [--most 2] [--seed N] [--output FILE]

It starts a cluster of its own, measures how many prompt tokens a second one group computes, waits until there
is one group again, and then sends prompts of their own, `--share` of that rate for `--burst-s` seconds, and a
tenth of it before and after. One line for every five seconds: the rate asked, groups wanted and ready, mean
time to the first token of late, what the policy found and why.

At the end: the mean time to the first token before the burst, in its second half and after it, against the
target; and the seconds between changes of direction. The last line of output is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import copy
import json
import random
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from cluster.deployment.load import SHIPPED_FILES, load_deployment
from cluster.figures.machine import facts
from cluster.launch.handover import deploy, wait_ready
from cluster.launch.local_cluster import LocalCluster, start_local_cluster, stop_all
from cluster.launch.ports import free_port
from cluster.running.directory_probe import ProbeError, read_directories

FILE = SHIPPED_FILES / "local-autoscaled.yaml"
PROMPT_TOKENS, OUTPUT_TOKENS = 384, 8
QUIET_SHARE = 0.1
LINE_S = 5.0
LOAD_TIMEOUT_S = 10.0
READY_S = 300.0  # patience on a busy machine


@dataclass
class Sent:
    """One request."""

    sent_s: float
    first_s: float | None = None  # until its first token
    error: str = ""


@dataclass
class Line:
    """What was so at one moment."""

    at_s: float
    rate: float  # requests a second, asked for
    ready: int
    target: int
    needed: float
    reason: str
    terms: dict[str, float]


@dataclass
class Replay:
    """One run."""

    url: str
    decision: Callable[[], dict[str, Any]]  # the policy's last about the pool; empty when none can be had
    random: random.Random  # of prompts and arrivals
    began_s: float = field(default_factory=time.monotonic)
    sent: list[Sent] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)

    @property
    def now_s(self) -> float:
        return time.monotonic() - self.began_s

    async def ask(self, client: httpx.AsyncClient) -> None:
        """One prompt of its own."""
        body = {
            "prompt": [self.random.randrange(10, 40_000) for _ in range(PROMPT_TOKENS)],
            "max_tokens": OUTPUT_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        sent = Sent(self.now_s)
        self.sent.append(sent)
        try:
            async with client.stream("POST", f"{self.url}/v1/completions", json=body) as answer:
                async for line in answer.aiter_lines():
                    if '"error"' in line:
                        sent.error = line[:200]
                    elif line.startswith("data: {") and sent.first_s is None:
                        sent.first_s = self.now_s - sent.sent_s
            if answer.status_code != 200:
                sent.error = str(answer.status_code)
        except httpx.HTTPError as error:
            sent.error = repr(error)

    async def watch(
        self, client: httpx.AsyncClient, rate_of: Callable[[float], float], period_s: float = LINE_S
    ) -> AsyncIterator[str]:
        """What there is to say, every period, for ever; also kept in `lines`."""
        while True:
            await asyncio.sleep(period_s)
            try:
                line = await self.look(client, rate_of)
            except httpx.HTTPError as error:  # a busy router; the run goes on
                yield f"{self.now_s:5.0f} s  /load: {error!r}"
                continue
            if line is None:
                yield f"{self.now_s:5.0f} s  no decision"
                continue
            self.lines.append(line)
            since_s = line.at_s - 2 * LINE_S
            waits = [s.first_s for s in self.sent if s.first_s is not None and s.sent_s > since_s]
            mean = f"{statistics.fmean(waits):5.2f}" if waits else "    -"
            terms = " ".join(f"{name} {value:.2f}" for name, value in line.terms.items())
            yield (
                f"{line.at_s:5.0f} s  {line.rate:4.1f}/s  groups {line.target} wanted, {line.ready} ready"
                f"  first token {mean} s  needed {line.needed:4.2f} ({terms}) {line.reason}"
            )

    async def look(self, client: httpx.AsyncClient, rate_of: Callable[[float], float]) -> Line | None:
        """What is so now; None while nothing has been decided. Raises httpx.HTTPError."""
        answer = await client.get(f"{self.url}/load", timeout=LOAD_TIMEOUT_S)
        groups = answer.raise_for_status().json()["groups"]
        pool = await asyncio.to_thread(self.decision)
        if not pool:
            return None
        at_s = self.now_s
        return Line(
            at_s=at_s,
            rate=rate_of(at_s),
            ready=sum(group["ready"] for group in groups),
            target=pool["target"],
            needed=pool["needed"],
            reason=pool["reason"],
            terms={name: value for name, value in pool["terms"].items() if value},
        )


def decision_of(cluster: LocalCluster, application: str) -> dict[str, Any]:
    """The policy's last about the pool `unified`; empty when there is none yet or the directory is late."""
    try:
        listing = read_directories(cluster.gcs_address, [application])[application]
    except (ProbeError, KeyError):
        return {}
    pool: dict[str, Any] = json.loads(listing.scaling or "{}").get("pools", {}).get("unified", {})
    return pool


async def measure_rate(replay: Replay, client: httpx.AsyncClient) -> float:
    """Requests a second of one group that is never idle."""
    began_s, number = time.monotonic(), 12
    await asyncio.gather(*(replay.ask(client) for _ in range(number)))
    rate = number / (time.monotonic() - began_s)
    if errors := [sent.error for sent in replay.sent if sent.error]:
        raise RuntimeError(f"{len(errors)} of {number} requests failed, the first with {errors[0]}")
    replay.sent.clear()
    return rate


async def wait_for_one_group(replay: Replay, client: httpx.AsyncClient) -> None:
    """What was measured has made the pool grow. Raises TimeoutError."""
    async with asyncio.timeout(READY_S):
        while True:
            line = await replay.look(client, lambda _: 0.0)
            if line is not None and line.target == line.ready == 1:
                return
            await asyncio.sleep(1.0)


async def run(replay: Replay, options: argparse.Namespace, console: Console) -> dict[str, Any]:
    async with httpx.AsyncClient(
        trust_env=False, timeout=300.0, limits=httpx.Limits(max_connections=None)
    ) as client:
        given: float | None = options.rate
        most = given or 0.0
        if given is None:
            most = await measure_rate(replay, client)
            console.print(f"one group: {most:.2f} requests/s of {PROMPT_TOKENS} + {OUTPUT_TOKENS} tokens")
            console.print("waiting until the pool is back at one group")
            await wait_for_one_group(replay, client)
        start_s, end_s = options.quiet_s, options.quiet_s + options.burst_s
        replay.began_s = time.monotonic()

        def rate_of(at_s: float) -> float:
            return most * (options.share if start_s <= at_s < end_s else QUIET_SHARE)

        async def show() -> None:
            async for line in replay.watch(client, rate_of):
                console.print(line)

        watch = asyncio.create_task(show())
        asking: set[asyncio.Task[None]] = set()
        while replay.now_s < end_s + options.after_s:
            # Never past a change of the rate: the time to the next request has no memory.
            wait_s = replay.random.expovariate(rate_of(replay.now_s))
            await asyncio.sleep(min(wait_s, 1.0))
            if wait_s > 1.0:
                continue
            asking.add(asyncio.create_task(replay.ask(client)))
        await asyncio.gather(*asking)
        watch.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watch
    return summary(replay, start_s, end_s)


def summary(replay: Replay, start_s: float, end_s: float) -> dict[str, Any]:
    """Means of the time to the first token, and seconds between changes of direction."""

    def mean(first: float, last: float) -> float | None:
        waits = [s.first_s for s in replay.sent if s.first_s is not None and first <= s.sent_s < last]
        return round(statistics.fmean(waits), 3) if waits else None

    turns = turns_s([(line.at_s, line.target) for line in replay.lines])
    return {
        "requests": len(replay.sent),
        "failed": [sent.error for sent in replay.sent if sent.error],
        "ttft_before_s": mean(0.0, start_s),
        "ttft_burst_first_half_s": mean(start_s, (start_s + end_s) / 2),
        "ttft_burst_second_half_s": mean((start_s + end_s) / 2, end_s),
        "ttft_after_s": mean(end_s, float("inf")),
        "most_groups": max((line.target for line in replay.lines), default=0),
        "turns_s": turns,
        "least_between_turns_s": min((later - earlier for earlier, later in pairwise(turns)), default=None),
    }


def turns_s(sizes: Sequence[tuple[float, int]]) -> list[float]:
    """When the direction of change turned."""
    turns, direction = [], 0
    for (_, before), (at_s, after) in pairwise(sizes):
        if after == before:
            continue
        new = 1 if after > before else -1
        if direction == -new:
            turns.append(round(at_s, 1))
        direction = new
    return turns


def deployment_of(options: argparse.Namespace, port: int) -> tuple[dict[str, Any], str]:
    """What Serve gets: the shipped file with its port, one thread a group and the bounds asked for."""
    settings = [
        "pools.unified.parallel.threads_per_rank=1",
        "pools.unified.cache.max_bytes=201326592",
        f"scaling.ttft_s={options.ttft_s}",
        f"scaling.tpot_s={options.tpot_s}",
    ]
    deployment = load_deployment(FILE, port=port, assignments=settings)
    tree = copy.deepcopy(deployment.tree)
    (app,) = tree["applications"]
    for entry in app["deployments"]:
        if "autoscaling_config" in entry:
            entry["autoscaling_config"]["max_replicas"] = options.most
    return tree, deployment.application


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quiet-s", type=float, default=20.0)
    parser.add_argument("--burst-s", type=float, default=90.0)
    parser.add_argument("--after-s", type=float, default=100.0)
    parser.add_argument("--share", type=float, default=1.3, help="of what one group can, in the burst")
    parser.add_argument("--rate", type=float, help="requests a second of one group, instead of measuring it")
    parser.add_argument("--most", type=int, default=2, help="groups")
    parser.add_argument("--ttft-s", type=float, default=1.5)
    parser.add_argument("--tpot-s", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=0, help="of prompts and arrivals")
    parser.add_argument("--output", type=Path, help="where all samples go, as JSON")
    options = parser.parse_args()
    console = Console(highlight=False, width=200)
    cluster = start_local_cluster(
        num_cpus=4, dashboard_port=free_port(), report=console.print, timeout_s=READY_S
    )
    try:
        tree, application = deployment_of(options, free_port())
        url = f"http://127.0.0.1:{tree['http_options']['port']}"
        deploy(cluster.api, tree, report=console.print)
        wait_ready(cluster.api, application=application, url=url, report=console.print, timeout_s=READY_S)
        replay = Replay(url, partial(decision_of, cluster, application), random.Random(options.seed))
        found = asyncio.run(run(replay, options, console))
    finally:
        stop_all(cluster)
    result = {
        "machine": facts(),
        "options": {name: str(value) for name, value in vars(options).items()},
        "target_ttft_s": options.ttft_s,
        **found,
    }
    if options.output is not None:
        samples = {
            "lines": [asdict(line) for line in replay.lines],
            "sent": [asdict(sent) for sent in replay.sent],
        }
        options.output.write_text(json.dumps({**result, **samples}, indent=1))
    console.print(json.dumps(result), soft_wrap=True)


if __name__ == "__main__":
    main()
