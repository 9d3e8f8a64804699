"""How many groups of what kind meet a demand, from the cost of a step: one pool, or prefill and decode apart.

Decode rows of a group settle where as many tokens come out as are asked for (Little's law): b requests at the
same time, b = rate x output x time per token, which itself grows with b. In one pool prompts and decode rows
share steps, so both slow each other down; apart, each pool is sized for itself. Reuse of prefixes is not
counted on, nor is the time of moving KV blocks: measure, or simulate, what a proposal is worth.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from cluster.figures.step_cost import StepCost
from cluster.figures.words import counted
from cluster.plan.demand import Demand, Targets
from cluster.plan.queueing import PrefillQueue

_MOST_GROUPS = 1024  # of a pool, as in deployment files
_HEADROOM = 0.85  # of the batch that just meets the target, and of the pool: arrivals are random
_MOST_BUSY = 0.9  # of the time in steps with prompts, in one pool
_ROUNDS = 200


class NotReachable(ValueError):
    """No number of groups meets the targets. The text says which target and by how much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLimits:
    """One group: what its steps cost and what its pool holds."""

    cost: StepCost
    tensor_parallel: int
    devices: int  # one a rank; ranks on CPUs share a machine
    step_tokens: int
    pool_tokens: int  # of its KV cache
    max_running: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolProposal:
    """Groups of one role."""

    role: str  # unified, prefill or decode
    groups: int
    tensor_parallel: int
    devices: int  # of all groups
    batch: float  # requests that decode in a group at the same time; 0 in prefill
    busy: float  # share of the time in steps with prompts; in decode, of the batch that it is planned for


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """Pools that meet the targets, and what to expect of them."""

    pools: tuple[PoolProposal, ...]
    ttft_p90_s: float
    tpot_s: float
    longest_gap_s: float  # between tokens, when a prompt's chunk shares the step

    @property
    def devices(self) -> int:
        return sum(pool.devices for pool in self.pools)

    @property
    def ratio(self) -> str:
        """Prefill : decode groups; empty for one pool."""
        groups = {pool.role: pool.groups for pool in self.pools}
        if "prefill" not in groups:
            return ""
        common = math.gcd(groups["prefill"], groups["decode"])
        return f"{groups['prefill'] // common}:{groups['decode'] // common}"


def propose_unified(demand: Demand, targets: Targets, group: GroupLimits) -> Proposal:
    """The fewest groups that do both. Raises NotReachable."""
    queue = _checked_queue(demand, targets, group)
    most = _largest_batch(demand, targets, group)
    best = ""
    for groups in _counts(demand.rate * queue.mean_s):
        state = _settle_together(demand, demand.rate / groups, group, queue)
        if state is None or state.busy > _MOST_BUSY or state.batch > most:
            continue
        if state.tpot_s <= targets.tpot_s and state.ttft_s <= targets.ttft_s:
            pool = PoolProposal(
                role="unified",
                groups=groups,
                tensor_parallel=group.tensor_parallel,
                devices=groups * group.devices,
                batch=state.batch,
                busy=state.busy,
            )
            return Proposal(
                pools=(pool,),
                ttft_p90_s=state.ttft_s,
                tpot_s=state.tpot_s,
                longest_gap_s=state.gap_s,
            )
        figures = f"TTFT {state.ttft_s:.3g} s and TPOT {state.tpot_s * 1e3:.3g} ms"
        best = f"; with {counted(groups, 'group')} {figures}"
    raise NotReachable(f"one pool of up to {_MOST_GROUPS:,} groups misses a target{best}")


def propose_apart(demand: Demand, targets: Targets, group: GroupLimits) -> Proposal:
    """The fewest prefill groups and the fewest decode groups. Raises NotReachable."""
    queue = _checked_queue(demand, targets, group)
    most, context, cost = _largest_batch(demand, targets, group), demand.mean_context, group.cost
    tokens_per_s = demand.rate * demand.mean_output
    decode_groups = max(1, math.ceil(tokens_per_s * cost.decode_step_seconds(most, context) / most))
    if decode_groups > _MOST_GROUPS:
        raise NotReachable(
            f"{decode_groups:,} decode groups would be needed, a pool has at most {_MOST_GROUPS:,}"
        )
    batch = _settle(tokens_per_s / decode_groups, cost, context, most)
    step_s = cost.decode_step_seconds(batch, context)
    for groups in _counts(demand.rate * queue.mean_s):
        # The decode group computes the last tokens of a prompt itself, in a step of its own.
        ttft_s = queue.ttft_p90_s(demand.rate / groups) + step_s
        if ttft_s <= targets.ttft_s:
            break
    else:
        raise NotReachable(f"{_MOST_GROUPS:,} prefill groups do not reach TTFT {targets.ttft_s:g} s")
    prefill = PoolProposal(
        role="prefill",
        groups=groups,
        tensor_parallel=group.tensor_parallel,
        devices=groups * group.devices,
        batch=0.0,
        busy=queue.busy(demand.rate / groups),
    )
    decode = PoolProposal(
        role="decode",
        groups=decode_groups,
        tensor_parallel=group.tensor_parallel,
        devices=decode_groups * group.devices,
        batch=batch,
        busy=batch / most,
    )
    return Proposal(pools=(prefill, decode), ttft_p90_s=ttft_s, tpot_s=step_s, longest_gap_s=step_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settled:
    """A group of one pool, after the coming and going has evened out."""

    batch: float
    busy: float
    ttft_s: float
    tpot_s: float
    gap_s: float


def _settle_together(demand: Demand, rate: float, group: GroupLimits, alone: PrefillQueue) -> _Settled | None:
    """A group that gets `rate` of the requests; None when it cannot keep up."""
    cost, context, batch = group.cost, demand.mean_context, 1.0
    full_step_s = cost.prefill_seconds(group.step_tokens, step_tokens=group.step_tokens)
    for _ in range(_ROUNDS):
        extra_s = cost.added_by_rows(batch, context)
        queue = alone.slowed(extra_s)
        busy = queue.busy(rate)
        if busy >= 1 or batch > 1e6:
            return None
        # Every step brings each decode row a token, whether a prompt shares it or not.
        steps_per_s = rate * alone.mean_steps + (1 - busy) / cost.decode_step_seconds(batch, context)
        wanted = rate * demand.mean_output / steps_per_s
        if abs(wanted - batch) <= 1e-6 * batch:
            break
        batch = (batch + wanted) / 2
    return _Settled(
        batch=batch,
        busy=busy,
        ttft_s=queue.ttft_p90_s(rate) + cost.decode_step_seconds(batch, context),
        tpot_s=1 / steps_per_s,
        gap_s=full_step_s + extra_s,
    )


def _settle(tokens_per_s: float, cost: StepCost, context: float, most: float) -> float:
    """Decode rows of a group from which so many tokens come."""
    batch = most
    for _ in range(_ROUNDS):
        batch = min(most, tokens_per_s * cost.decode_step_seconds(batch, context))
    return batch


def _checked_queue(demand: Demand, targets: Targets, group: GroupLimits) -> PrefillQueue:
    """Raises NotReachable where a prompt alone takes too long."""
    queue = PrefillQueue.of(demand, group.cost, step_tokens=group.step_tokens)
    if queue.p90_s > targets.ttft_s:
        raise NotReachable(
            f"TTFT: a tenth of the prompts takes {queue.p90_s:.3g} s or more on an idle group of "
            f"{group.tensor_parallel}, {targets.ttft_s:g} s are allowed: more ranks or a faster device"
        )
    return queue


def _largest_batch(demand: Demand, targets: Targets, group: GroupLimits) -> int:
    """Decode rows that a group is planned for: within target and pool, with headroom. Raises NotReachable."""
    context, length = demand.mean_context, demand.mean_prompt + demand.mean_output
    room = min(group.max_running, group.pool_tokens / length)
    high = max(1, int(_HEADROOM * room))
    if room < 1:
        raise NotReachable(f"a KV pool of {group.pool_tokens:,} tokens holds no request of this length")
    alone_s = group.cost.decode_step_seconds(1, context)
    if alone_s > targets.tpot_s:
        raise NotReachable(
            f"TPOT: a request alone takes {alone_s * 1e3:.3g} ms a token, {targets.tpot_s * 1e3:.3g} ms are "
            "allowed: more ranks, fewer bits or a faster device"
        )
    low = 1
    while low < high:
        middle = (low + high + 1) // 2
        if group.cost.decode_step_seconds(middle / _HEADROOM, context) <= targets.tpot_s:
            low = middle
        else:
            high = middle - 1
    return low


def _counts(at_least: float) -> Iterable[int]:
    """Numbers of groups to try: each up to 100, then in steps of a hundredth."""
    groups = max(1, math.ceil(at_least))
    while groups <= _MOST_GROUPS:
        yield groups
        groups += max(1, groups // 100)
