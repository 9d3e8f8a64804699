"""A trace replayed to two real groups on this machine, and the same trace in `tandem simulate`.

    python -m benchmarks.simulation TRACE [--requests 300] [--length-divisor 32] [--rate-divisor 4] [-o FILE]

Starts two groups of one thread each with deploy/local-two-groups.yaml, measures the cost of a step with one
thread, alone and with another thread that does the same, replays, and measures again; then simulates with
either pair. What a request takes besides its group is that of short requests sent one after the other, less
their steps. The run is only worth something on a machine that does nothing else: the costs say how far that
was so.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.http import serving
from cluster.bench.child import measure
from cluster.bench.client import ServedModel
from cluster.bench.latency import Outcome
from cluster.bench.load import Due, Server, of_trace, run_load
from cluster.bench.orders import CalibrateOrder, EngineSettings
from cluster.deployment.load import SHIPPED_FILES
from cluster.figures.machine import facts
from cluster.figures.step_cost import StepCost, StepShape
from cluster.figures.traces import TraceRequest, read_trace, scaled
from cluster.launch.ports import free_port
from cluster.models.embedded import ensure
from cluster.simulate.peers import Network
from cluster.simulate.report import Report, report
from cluster.simulate.run import SimConfig, simulate
from workers.types import Role

_FILE = SHIPPED_FILES / "local-two-groups.yaml"
_GROUPS = 2
_NUM_BLOCKS = 4096
_CALIBRATE_S = 25.0
_CALIBRATE_TIMEOUT_S = 900.0
_ANSWER_TIMEOUT_S = 900.0
_PROBES, _PROBE_TOKENS, _PROBE_PAUSE_S = 12, 12, 1.0
_NETWORK = Network(bytes_per_s=1e9, latency_s=0.003)  # out of the other process's memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What the real groups did."""

    outcomes: Sequence[Outcome]
    probes: Sequence[Outcome]

    @property
    def mean_ttft_s(self) -> float:
        return statistics.fmean(outcome.ttft_ms for outcome in self.outcomes) / 1e3

    @property
    def hit_tokens(self) -> int:
        return sum(outcome.cached_tokens for outcome in self.outcomes)

    def front_s(self, cost: StepCost) -> float:
        """What a request takes besides its group."""
        alone_s = cost.seconds(StepShape(prefill_tokens=_PROBE_TOKENS))
        probe_s = statistics.median(outcome.ttft_ms for outcome in self.probes) / 1e3
        return max(probe_s - alone_s, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Of a step with one thread."""

    alone: StepCost
    crowded: StepCost  # while the other core does the same


def measured(folder: Path, requests: Sequence[TraceRequest]) -> Costs:
    """As it is now."""
    alone = calibrated(folder)
    with ThreadPoolExecutor(_GROUPS) as threads:
        one, other = threads.map(calibrated, [folder] * _GROUPS)
    return Costs(alone=alone, crowded=mean_cost(one, other, requests))


def calibrated(folder: Path) -> StepCost:
    """The cost of a step with one thread."""
    order = CalibrateOrder(engine=EngineSettings(model=str(folder), threads=1), seconds=_CALIBRATE_S)
    result = measure(order, _say, timeout_s=_CALIBRATE_TIMEOUT_S)
    return StepCost.of(result["cost"])


def replay(port: int, requests: Sequence[TraceRequest]) -> Replayed:
    """Probes first, then the trace. Raises RuntimeError when a request fails."""
    server = Server(url=f"http://127.0.0.1:{port}", headers={}, timeout_s=_ANSWER_TIMEOUT_S)
    probes = run_load(server, _probes, _say).outcomes
    sent = run_load(server, lambda model: of_trace(requests, vocab_size=1000, longest=None), _say)
    outcomes = sent.outcomes
    failed = [outcome.error for outcome in (*probes, *outcomes) if not outcome.is_answered]
    if failed:
        raise RuntimeError(f"{len(failed)} requests failed; the first: {failed[0]}")
    return Replayed(outcomes=outcomes, probes=probes)


def simulated(requests: Sequence[TraceRequest], costs: Costs, front_s: float) -> Report:
    """The same cluster in virtual time."""
    config = SimConfig(
        groups={Role.UNIFIED: _GROUPS},
        cost=costs.alone,
        crowded_cost=costs.crowded,
        num_blocks=_NUM_BLOCKS,
        network=_NETWORK,
        front_s=front_s,
    )
    return report("simulated", simulate(requests, config, "prefix"))


def _probes(_: ServedModel) -> Iterator[Due]:
    """Short prompts with nothing in common, far apart."""
    for number in range(_PROBES):
        prompt = [10 + number, *range(100, 100 + _PROBE_TOKENS - 1)]
        yield Due(number=number, due_s=number * _PROBE_PAUSE_S, prompt=prompt, max_tokens=1)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def print_table(real: Replayed, runs: Sequence[Report]) -> None:
    """Each simulation beside the real run."""
    table = Table(title=f"{len(real.outcomes)} requests, {_GROUPS} groups of one thread")
    for heading in ("", "mean TTFT s", "real", "hit tokens", "real", "busy"):
        table.add_column(heading, justify="right" if heading else "left")
    real_s, real_hits = real.mean_ttft_s, max(real.hit_tokens, 1)
    table.add_row("real", f"{real_s:.3f}", "", str(real.hit_tokens), "", "")
    for name, run in zip(("cost measured before", "cost measured after", "mean of both"), runs, strict=True):
        table.add_row(
            name,
            f"{run.ttft_s.mean:.3f}",
            f"{run.ttft_s.mean / real_s - 1:+.1%}",
            str(run.hit_tokens),
            f"{run.hit_tokens / real_hits - 1:+.1%}",
            f"{run.busy_share:.0%}",
        )
    Console().print(table)


def mean_cost(one: StepCost, other: StepCost, requests: Sequence[TraceRequest]) -> StepCost:
    """The first, as much slower or faster as the mean of both is in a typical prompt."""
    tokens = round(statistics.fmean(request.prompt_tokens for request in requests))
    factor = (1 + other.prefill_seconds(tokens) / one.prefill_seconds(tokens)) / 2
    return StepCost(
        overhead_s=one.overhead_s * factor,
        weights_s=one.weights_s * factor,
        token_s=one.token_s * factor,
        row_s=one.row_s * factor,
        context_token_s=one.context_token_s * factor,
        pair_s=one.pair_s * factor,
        blend=one.blend,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.simulation", description=__doc__.split("\n")[0]
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--length-divisor", type=float, default=32.0)
    parser.add_argument("--rate-divisor", type=float, default=4.0)
    parser.add_argument("-o", "--out", type=Path, help="everything as JSON")
    options = parser.parse_args()
    requests = scaled(
        read_trace(options.trace, limit=options.requests),
        length_divisor=options.length_divisor,
        rate_divisor=options.rate_divisor,
    )
    folder = ensure(_say)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the cluster is stopped
    port = free_port()
    settings = (
        str(_FILE),
        "--set", "pools.unified.parallel.threads_per_rank=1",
        "--set", f"pools.unified.cache.num_blocks={_NUM_BLOCKS}",
    )  # fmt: skip
    with serving(port, *settings):
        before = measured(folder, requests)
        real = replay(port, requests)
        after = measured(folder, requests)
    mean = Costs(
        alone=mean_cost(before.alone, after.alone, requests),
        crowded=mean_cost(before.crowded, after.crowded, requests),
    )
    costs = (before, after, mean)
    runs = [simulated(requests, cost, real.front_s(cost.alone)) for cost in costs]
    print_table(real, runs)
    if options.out is not None:
        content: dict[str, Any] = {
            "settings": {name: str(value) for name, value in vars(options).items()},
            "machine": facts(),
            "real": {"mean_ttft_s": real.mean_ttft_s, "hit_tokens": real.hit_tokens},
            "front_s": [real.front_s(cost.alone) for cost in costs],
            "costs": [repr(cost) for cost in costs],
            "simulated": [
                {"mean_ttft_s": run.ttft_s.mean, "hit_tokens": run.hit_tokens, "busy_share": run.busy_share}
                for run in runs
            ],
            "samples": [
                {"ttft_ms": outcome.ttft_ms, "cached": outcome.cached_tokens} for outcome in real.outcomes
            ],
        }
        options.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
