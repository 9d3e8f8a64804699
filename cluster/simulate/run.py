"""A trace through a simulated cluster.

    outcome = simulate(requests, SimConfig(groups={Role.UNIFIED: 1000}, cost=...), policy="prefix")

The same arguments always come to the same result.
"""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

from cluster.figures.step_cost import StepCost
from cluster.figures.traces import TraceRequest
from cluster.figures.words import counted
from cluster.simulate.group import GroupKind, SimGroup
from cluster.simulate.peers import Exchange, Network
from cluster.simulate.rivals import LongestPrefix, PowerOfTwo, Rival
from cluster.simulate.router import Served, SimRouter
from cluster.simulate.world import World
from router.routing.policy import PlacementPolicy, PolicyConfig
from workers.config import CacheConfig, ScheduleConfig
from workers.host_memory import available_host_bytes
from workers.types import GroupId, GroupInfo, Role

POLICIES = ("prefix", "round_robin", "power_of_two", "longest_prefix", "least_loaded")
_VOCAB_SIZE = 49_152
_DTYPE = "bfloat16"
_BLOCK_BYTES, _GROUP_BYTES = 72, 20_000  # of this process, for what the engine of a group knows of its pool


@dataclass(frozen=True, slots=True, kw_only=True)
class SimConfig:
    """A cluster to simulate."""

    groups: Mapping[Role, int]
    cost: StepCost
    # While another group computes, where all share a machine; None: the same.
    crowded_cost: StepCost | None = None
    num_blocks: int  # KV blocks of a group
    cache: CacheConfig = field(default_factory=CacheConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    router: PolicyConfig = field(default_factory=PolicyConfig)
    kv_bytes_per_token: int = 23_040  # SmolLM2-135M in bfloat16
    network: Network | None = None  # None: groups do not read each other's blocks
    front_s: float = 0.0  # what every request takes besides its group: HTTP, tokenizer, router
    seed: int = 0
    can_leap: bool = True  # False, or crowded_cost: one step at a time, slower and the same


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a run. Sequences of groups are in the order of their names."""

    policy: str
    served: Sequence[Served]
    busy_s: Sequence[float]  # in steps, by group
    num_requests: Sequence[int]  # by group that answers
    span_s: float  # virtual, until the last token
    num_steps: int
    num_preemptions: int
    num_events: int
    pulled_tokens: int
    decision_s: Sequence[float]  # CPU time of each choice
    wall_s: float  # real time of the run
    cpu_s: float  # of this process in it
    peak_bytes: int  # of this process so far

    @property
    def hit_tokens(self) -> int:
        """Prompt tokens that were found in a cache."""
        return sum(served.cached_tokens for served in self.served)


class DoesNotFit(ValueError):
    """A cluster that cannot serve the trace. The text says why."""


def simulate(requests: Sequence[TraceRequest], config: SimConfig, policy: str) -> Outcome:
    """Runs the trace to its end, and asserts that every request has ended once and every pool is sound.
    Raises DoesNotFit."""
    check_fits(requests, config)
    started, cpu_started = time.perf_counter(), time.process_time()
    with _few_collections():
        world = World()
        router = _router(world, config, policy)
        groups = _groups(world, config, router)
        for request in requests:
            world.at(request.arrival_s + config.front_s, partial(router.arrive, request))
        world.run()
        router.check_end()
        for group in groups:
            group.check_end()
    answering = [group for group in groups if group.info.role is not Role.PREFILL]
    counts = dict.fromkeys((group.info.group_id for group in answering), 0)
    for served in router.results:
        counts[served.group_id] += 1
    stats = [group.engine.stats() for group in groups]
    return Outcome(
        policy=policy,
        served=router.results,
        busy_s=[group.busy_s for group in groups],
        num_requests=list(counts.values()),
        span_s=max((served.end_s or 0.0 for served in router.results), default=0.0),
        num_steps=sum(entry.num_steps for entry in stats),
        num_preemptions=sum(entry.preemptions_total for entry in stats),
        num_events=world.num_events,
        pulled_tokens=router.pulled_tokens,
        decision_s=router.decision_s,
        wall_s=time.perf_counter() - started,
        cpu_s=time.process_time() - cpu_started,
        peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def check_fits(requests: Sequence[TraceRequest], config: SimConfig) -> None:
    """The cluster to the trace, and its block pools into this machine's memory. Raises DoesNotFit."""
    if not any(count for role, count in config.groups.items() if role is not Role.PREFILL):
        raise DoesNotFit("no group answers: unified or decode groups are needed")
    if config.groups.get(Role.PREFILL) and config.network is None:
        raise DoesNotFit(
            "prefill groups hand blocks over: a network between the groups is needed (--transfer GB/S)"
        )
    size = config.cache.block_size
    longest = max(requests, key=lambda request: request.prompt_tokens + request.output_tokens)
    needed = -(-(longest.prompt_tokens + longest.output_tokens) // size)
    if needed > config.num_blocks:
        raise DoesNotFit(
            f"request {longest.number} has {longest.prompt_tokens:,} + {longest.output_tokens:,} tokens, in"
            f" {needed:,} KV blocks; a group has {config.num_blocks:,} (--blocks)"
        )
    count = sum(config.groups.values())
    wanted, free = count * (config.num_blocks * _BLOCK_BYTES + _GROUP_BYTES), available_host_bytes()
    if wanted > free:
        raise DoesNotFit(
            f"{counted(count, 'group')} of {config.num_blocks:,} KV blocks take {wanted / 1e9:.1f} GB of "
            f"this machine's memory, {free / 1e9:.1f} GB are free: fewer groups or --blocks"
        )


def _router(world: World, config: SimConfig, policy: str) -> SimRouter:
    rivals: dict[str, Rival] = {"power_of_two": PowerOfTwo(config.seed), "longest_prefix": LongestPrefix()}
    own = PlacementPolicy.PREFIX if policy in rivals else PlacementPolicy(policy)
    return SimRouter(
        world,
        policy=replace(config.router, policy=own),
        rival=rivals.get(policy),
        vocab_size=_VOCAB_SIZE,
    )


def _groups(world: World, config: SimConfig, router: SimRouter) -> list[SimGroup]:
    kind = GroupKind(
        cost=config.cost,
        crowded_cost=config.crowded_cost,
        cache=config.cache,
        schedule=config.schedule,
        can_leap=config.can_leap and config.crowded_cost is None,
    )
    by_id: dict[GroupId, SimGroup] = {}
    exchange = Exchange(world, config.network, by_id.__getitem__) if config.network is not None else None
    for role, count in config.groups.items():
        for number in range(count):
            info = _info(config, role, number)
            group = SimGroup(
                world=world,
                info=info,
                kind=kind,
                neighbours=by_id.values(),
                listener=router,
                peers=exchange.peers_of(info.group_id) if exchange is not None else None,
                on_offer=exchange.offered if exchange is not None else None,
            )
            by_id[info.group_id] = group
            router.add_group(group)
    return list(by_id.values())


def _info(config: SimConfig, role: Role, number: int) -> GroupInfo:
    size = config.cache.block_size
    return GroupInfo(
        group_id=GroupId(f"{role.value}-{number:04d}"),
        epoch=1,
        role=role,
        model="simulated",
        model_hash="",
        dtype=_DTYPE,
        kv_dtype=_DTYPE,
        tensor_parallel=1,
        vocab_size=_VOCAB_SIZE,
        max_model_len=config.num_blocks * size,
        block_size=size,
        num_blocks=config.num_blocks,
        kv_bytes_per_block=config.kv_bytes_per_token * size,
        context_token_s=config.cost.context_token_s,
        exchanges_kv=config.network is not None,
    )


@contextmanager
def _few_collections() -> Iterator[None]:
    """Millions of objects that live to the end make the collector's full rounds long; there are no cycles to
    speak of."""
    before = gc.get_threshold()
    gc.set_threshold(100_000, 50, 1_000_000)
    try:
        yield
    finally:
        gc.set_threshold(*before)
