"""Pools of groups in virtual time: requests come, steps take what the step-cost model says, groups start late
and are drained, and once a second the policy decides."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from cluster.figures.step_cost import StepCost, StepShape, causal_pairs
from cluster.scaling.decide import Decision, decide
from cluster.scaling.targets import ScalingTargets
from cluster.scaling.view import Memory, PoolView
from workers.data_plane.signals import WINDOW_S, GroupSignals, signals
from workers.types import GroupStats, Role

STEP_TOKENS = 512
NUM_BLOCKS, BLOCK = 4000, 16
START_S = 6.0  # from the decision to a group that takes requests


@dataclass(eq=False)
class Request:
    came_s: float
    prompt: int
    output: int
    computed: int = 0
    given: int = 0
    first_s: float | None = None


@dataclass(eq=False)
class Group:
    ready_s: float
    is_draining: bool = False
    busy_until_s: float = 0.0
    requests: list[Request] = field(default_factory=list)
    prompt_total: int = 0
    output_total: int = 0
    num_first: int = 0
    first_s: float = 0.0
    step_total_s: float = 0.0
    num_steps: int = 0
    seen: list[tuple[float, GroupStats]] = field(default_factory=list)

    def step(self, now_s: float, cost: StepCost) -> None:
        """One step: a token for each that decodes, then prompt tokens in order of arrival."""
        decoding = [request for request in self.requests if request.computed == request.prompt]
        budget = STEP_TOKENS - len(decoding)
        chunks = []
        for request in self.requests:
            tokens = min(request.prompt - request.computed, budget)
            if tokens > 0:
                chunks.append((request, tokens))
                budget -= tokens
        shape = StepShape(
            prefill_tokens=sum(tokens for _, tokens in chunks),
            prefill_pairs=sum(causal_pairs(tokens, request.computed) for request, tokens in chunks),
            decode_rows=len(decoding),
            context_tokens=sum(request.prompt + request.given for request in decoding),
        )
        seconds = cost.seconds(shape)
        self.step_total_s += seconds
        self.num_steps += 1
        self.busy_until_s = end_s = now_s + seconds
        for request, tokens in chunks:
            request.computed += tokens
            self.prompt_total += tokens
        for request in [*decoding, *(request for request, _ in chunks if request.computed == request.prompt)]:
            request.given += 1
            self.output_total += 1
            if request.first_s is None:
                request.first_s = end_s
                self.num_first += 1
                self.first_s += end_s - request.came_s
        self.requests = [request for request in self.requests if request.given < request.output]

    def signals(self, now_s: float) -> GroupSignals:
        decoding = [request for request in self.requests if request.computed == request.prompt]
        active = sum(-(-(request.computed + request.given) // BLOCK) for request in self.requests)
        stats = GroupStats(
            num_running=len(decoding),
            num_waiting=len(self.requests) - len(decoding),
            waiting_tokens=sum(request.prompt - request.computed for request in self.requests),
            running_tokens=sum(request.prompt + request.given for request in decoding),
            free_blocks=NUM_BLOCKS - active,
            active_blocks=active,
            step_seconds_total=self.step_total_s,
            num_steps=self.num_steps,
            prompt_tokens_total=self.prompt_total,
            generated_tokens_total=self.output_total,
            first_tokens_total=self.num_first,
            first_token_seconds_total=self.first_s,
        )
        self.seen = [entry for entry in self.seen if entry[0] > now_s - WINDOW_S] + [(now_s, stats)]
        return signals(self.seen[0][1], stats, now_s - self.seen[0][0])


class World:
    """One unified pool under a load."""

    def __init__(
        self,
        *,
        targets: ScalingTargets,
        cost: StepCost,
        believed: StepCost | None = None,
        least: int = 1,
        most: int = 8,
        seed: int = 0,
    ) -> None:
        """`believed`: what the policy is told of the cost, when it is not the truth."""
        self.targets, self.cost, self.believed = targets, cost, believed or cost
        self.least, self.most = least, most
        self.random = random.Random(seed)
        self.groups = [Group(ready_s=0.0) for _ in range(least)]
        self.held: list[Request] = []  # for want of a group
        self.done: list[Request] = []
        self.memory = Memory()
        self.decisions: list[tuple[float, Decision]] = []

    @property
    def target(self) -> int:
        return sum(not group.is_draining for group in self.groups)

    def run(self, end_s: float, rate: Callable[[float], float], prompt: int = 256, output: int = 32) -> None:
        """`rate` of arrivals a second, by time."""
        now_s, tick_s = 0.0, 0.0
        while now_s < end_s:
            if self.random.random() < rate(now_s) * 0.005:
                request = Request(now_s, prompt, output)
                self.done.append(request)
                self.held.append(request)
            ready = [group for group in self.groups if group.ready_s <= now_s and not group.is_draining]
            while self.held and ready:
                best = min(ready, key=lambda group: sum(r.prompt - r.computed + 8 for r in group.requests))
                best.requests.append(self.held.pop(0))
            for group in self.groups:
                if group.requests and group.busy_until_s <= now_s:
                    group.step(now_s, self.cost)
            self.groups = [group for group in self.groups if not group.is_draining or group.requests]
            if now_s >= tick_s:
                tick_s += 1.0
                self._decide(now_s)
            now_s += 0.005

    def _decide(self, now_s: float) -> None:
        running = [group for group in self.groups if group.ready_s <= now_s and not group.is_draining]
        view = PoolView(
            role=Role.UNIFIED,
            target=self.target,
            least=self.least,
            most=self.most,
            reports=[group.signals(now_s) for group in running],
            num_wanting=0.0 if running else float(len(self.held)),
        )
        decision = decide({"unified": view}, self.targets, self.believed, self.memory, now_s)
        self.memory = decision.memory
        self.decisions.append((now_s, decision))
        wanted = decision.pools["unified"].target
        for _ in range(wanted - self.target):
            self.groups.append(Group(ready_s=now_s + START_S))
        leaving = sorted((g for g in self.groups if not g.is_draining), key=lambda g: -g.ready_s)
        for group in leaving[: self.target - wanted]:
            group.is_draining = True

    def sizes(self) -> list[tuple[float, int]]:
        """(second, target) of every change."""
        changes: list[tuple[float, int]] = []
        for now_s, decision in self.decisions:
            pool = decision.pools["unified"]
            if pool.target != pool.before:
                changes.append((now_s, pool.target))
        return changes

    def mean_ttft_s(self, start_s: float, end_s: float) -> float:
        """Of requests that came in the time."""
        waits = [
            r.first_s - r.came_s for r in self.done if start_s <= r.came_s < end_s and r.first_s is not None
        ]
        return sum(waits) / len(waits)


def reversals_s(changes: Sequence[tuple[float, int]], first: int) -> list[float]:
    """When the direction of change turned."""
    turns, before, direction = [], first, 0
    for now_s, size in changes:
        new = 1 if size > before else -1
        if direction == -new:
            turns.append(now_s)
        direction, before = new, size
    return turns


def view(
    role: Role = Role.UNIFIED, target: int = 1, least: int = 1, most: int = 8, **signal: float
) -> PoolView:
    """A pool whose groups all say the same."""
    reports = [GroupSignals(**signal) for _ in range(target)]
    return PoolView(role=role, target=target, least=least, most=most, reports=reports)


def targets_of(pools: Mapping[str, PoolView], decision: Decision) -> dict[str, int]:
    return {name: decision.pools[name].target for name in pools}
