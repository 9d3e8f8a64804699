"""`tandem simulate`: a trace through a cluster of any size, in virtual time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from cluster.cli.numbers import MOST_BLOCKS, MOST_REQUESTS, MOST_TOKENS, whole_number
from cluster.cli.options import above_zero, divisor, json_lines
from cluster.cli.tables import table
from cluster.cli.terminal import CommandFailed, Phases, Terminal, UsageError
from cluster.figures.step_cost import SMOLLM2_ON_SMALL_CPU, StepCost, StepCostError
from cluster.figures.traces import TraceError, TraceRequest, read_trace, scaled
from cluster.figures.words import counted
from cluster.simulate.peers import Network
from cluster.simulate.report import Report, report
from cluster.simulate.run import POLICIES, DoesNotFit, SimConfig, check_fits, simulate
from workers.config import CacheConfig, ScheduleConfig
from workers.types import Role

ALL = "all"
_MOST_GROUPS = 100_000
_MOST_TRANSFER = 1e6  # GB/s
_COMPARED = ("prefix", "round_robin", "power_of_two", "longest_prefix")  # what `all` stands for
_DEFAULT_BLOCKS = 8448  # the longest prompts of public traces, 128k tokens

TraceArgument = Annotated[
    Path, typer.Argument(metavar="TRACE", help="A trace in Mooncake's (.jsonl) or Azure's (.csv) form.")
]
GroupsOption = Annotated[
    int | None,
    typer.Option("--groups", min=1, max=_MOST_GROUPS, help="Worker groups in one pool; 1 by default."),
]
PoolsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--pools",
        metavar="prefill=N,decode=M",
        help="Pools instead of --groups. Several times: one cluster after the other.",
    ),
]
PolicyOption = Annotated[
    str, typer.Option("--policy", help=f"How requests are placed: {', '.join(POLICIES)}, or all.")
]
LengthsOption = Annotated[
    float,
    typer.Option(
        "--length-divisor",
        "--scale-lengths",
        callback=divisor,
        help="Prompts and answers that many times shorter.",
    ),
]
RateOption = Annotated[
    float,
    typer.Option(
        "--rate-divisor",
        "--scale-rate",
        callback=divisor,
        help="Requests that many times less often, e.g. 0.25.",
    ),
]
RequestsOption = Annotated[
    int | None, typer.Option("--requests", min=1, max=MOST_REQUESTS, help="Only the first ones.")
]
CostOption = Annotated[
    Path | None,
    typer.Option("--cost", help="Step cost of a group, from `tandem bench calibrate`; else a small CPU's."),
]
BlocksOption = Annotated[int, typer.Option("--blocks", min=1, max=MOST_BLOCKS, help="KV blocks of a group.")]
StepTokensOption = Annotated[
    int | None, typer.Option("--step-tokens", min=1, max=MOST_TOKENS, help="Token budget of a step.")
]
TransferOption = Annotated[
    float | None,
    typer.Option(
        "--transfer",
        callback=above_zero,
        max=_MOST_TRANSFER,
        metavar="GB/S",
        help="Groups read each other's KV blocks at this rate.",
    ),
]
KvBytesOption = Annotated[int, typer.Option("--kv-bytes", min=1, max=1 << 30, help="Bytes of KV a token.")]
UniqueOption = Annotated[bool, typer.Option("--no-sharing", help="As if no two prompts began alike.")]
SeedOption = Annotated[int, typer.Option("--seed", help="Of policies that draw lots.")]
StepwiseOption = Annotated[
    bool, typer.Option("--stepwise", help="Every step by itself: slower, the same result.")
]


def simulate_command(
    trace: TraceArgument,
    groups: GroupsOption = None,
    pools: PoolsOption = None,
    policy: PolicyOption = "prefix",
    length_divisor: LengthsOption = 1.0,
    rate_divisor: RateOption = 1.0,
    requests: RequestsOption = None,
    cost: CostOption = None,
    blocks: BlocksOption = _DEFAULT_BLOCKS,
    step_tokens: StepTokensOption = None,
    transfer: TransferOption = None,
    kv_bytes: KvBytesOption = 23_040,
    no_sharing: UniqueOption = False,
    seed: SeedOption = 0,
    stepwise: StepwiseOption = False,
    as_json: Annotated[bool, json_lines("each run")] = False,
) -> None:
    """Send a trace through a cluster in virtual time: the real router, scheduler and block pool, with a
    predicted duration in place of each step."""
    terminal = Terminal(as_json=as_json, has_lines=True)
    reports: list[Report] = []
    with terminal.exit_codes():
        try:
            with Phases(terminal) as phases:
                phases.start("reading the trace")
                clusters, policies, measured = _clusters(groups, pools), _policies(policy), _cost(cost)
                traced = _read(trace, requests, length_divisor, rate_divisor, no_sharing)
                schedule = ScheduleConfig()
                if step_tokens is not None:
                    schedule = ScheduleConfig(max_step_tokens=step_tokens)
                configs = {
                    name: SimConfig(
                        groups=sizes,
                        cost=measured,
                        num_blocks=blocks,
                        cache=CacheConfig(),
                        schedule=schedule,
                        kv_bytes_per_token=kv_bytes,
                        network=Network(bytes_per_s=transfer * 1e9) if transfer is not None else None,
                        seed=seed,
                        can_leap=not stepwise,
                    )
                    for name, sizes in clusters.items()
                }
                for config in configs.values():
                    check_fits(traced, config)
                for name, config in configs.items():
                    for each in policies:
                        phases.start(f"{counted(len(traced), 'request')}, {name}, {each}")
                        reports.append(report(name, simulate(traced, config, each)))
                        if as_json:
                            terminal.emit(**asdict(reports[-1]))
        except DoesNotFit as error:
            raise CommandFailed(str(error)) from error
        except MemoryError as error:
            raise CommandFailed(
                "the memory of this machine does not suffice: fewer groups, --blocks or --requests"
            ) from error
        finally:  # also of a run that was interrupted
            if reports and not as_json:
                terminal.show(_table(reports))


def _read(
    file: Path, limit: int | None, length_divisor: float, rate_divisor: float, no_sharing: bool
) -> list[TraceRequest]:
    try:
        requests = read_trace(file, limit=limit)
        requests = scaled(requests, length_divisor=length_divisor, rate_divisor=rate_divisor)
    except TraceError as error:
        raise CommandFailed(str(error)) from error
    return [replace(request, prefix_ids=()) for request in requests] if no_sharing else requests


def _cost(file: Path | None) -> StepCost:
    if file is None:
        return SMOLLM2_ON_SMALL_CPU
    try:
        return StepCost.load(file)
    except StepCostError as error:
        raise CommandFailed(str(error)) from error


def _policies(policy: str) -> tuple[str, ...]:
    if policy == ALL:
        return _COMPARED
    if policy not in POLICIES:
        raise UsageError(f"--policy is {policy!r}: it must be one of {', '.join(POLICIES)}, or {ALL}")
    return (policy,)


def _clusters(groups: int | None, pools: list[str] | None) -> Mapping[str, Mapping[Role, int]]:
    """Groups by role of each cluster asked for, by name. Raises CommandFailed."""
    if not pools:
        number = 1 if groups is None else groups
        return {counted(number, "group"): {Role.UNIFIED: number}}
    if groups is not None:
        raise UsageError("--groups and --pools are both given: --pools says how many groups there are")
    return {text: _pools(text) for text in pools}


def _pools(text: str) -> dict[Role, int]:
    """Groups by role, as `--pools` says them."""
    known = {role.value: role for role in Role}
    sizes: dict[Role, int] = {}
    for part in text.split(","):
        name, _, number = part.strip().partition("=")
        size = whole_number(number, most=_MOST_GROUPS)
        if name not in known or size is None or known[name] in sizes:
            raise UsageError(
                f"--pools is {text[:100]!r}: it must be like prefill=2,decode=6, with pools of "
                f"{', '.join(known)} and at most {_MOST_GROUPS:,} groups"
            )
        sizes[known[name]] = size
    return sizes


def _table(reports: list[Report]) -> Table:
    found = table(
        *("cluster", "policy", "TTFT mean", "p50", "p90", "p99 s", "TPOT mean", "p90 ms", "tokens/s"),
        *("hits", "busy", "busiest", "preempted", "router us", "CPU s", "MiB"),
        left=("cluster", "policy"),
    )
    for entry in reports:
        ttft, tpot = entry.ttft_s, entry.tpot_s
        found.add_row(
            escape(entry.cluster),
            entry.policy,
            *(f"{value:.2f}" for value in (ttft.mean, ttft.p50, ttft.p90, ttft.p99)),
            *(f"{1000 * value:.1f}" for value in (tpot.mean, tpot.p90)),
            f"{entry.tokens_per_s:,.0f}",
            f"{100 * entry.hit_share:.1f} %",
            f"{100 * entry.busy_share:.0f} %",
            f"x{entry.busy_max_over_mean:.2f}",
            f"{entry.preemptions:,}",
            f"{entry.router_us.mean:.0f}",
            f"{entry.cpu_s:.0f}",
            f"{entry.peak_mib:,}",
        )
    return found
