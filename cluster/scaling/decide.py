"""How many groups each pool is to have from now on: a pure function of what is seen and remembered.

Up at once when the load asks for it. Down when fewer groups, with a margin, would have been enough for
`scale_down_after_s`, and then to the most that were needed meanwhile. Two changes of direction are at least
`min_reversal_s` apart, whatever the load does; but a request that waits for a pool at zero makes Serve itself
start a group at once. The pools are decided together: with `prefill_per_decode`
one follows the other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from cluster.figures.step_cost import StepCost
from cluster.scaling.needs import (
    Load,
    answer_terms,
    learned_slowness,
    load_of,
    measured_terms,
    needed,
    prompt_terms,
)
from cluster.scaling.targets import ScalingTargets
from cluster.scaling.view import Memory, PoolMemory, PoolView
from workers.types import Role

_MARGIN = 1.15  # a smaller pool must be enough for so much more work


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolDecision:
    """What is decided for a pool, and why."""

    before: int
    target: int
    needed: float  # groups, before bounds and damping
    terms: Mapping[str, float]  # groups that each reason asks for
    reason: str  # up, down, enough, or what holds a change back


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One decision over all pools."""

    pools: Mapping[str, PoolDecision]
    memory: Memory


def decide(
    pools: Mapping[str, PoolView], targets: ScalingTargets, cost: StepCost, memory: Memory, now_s: float
) -> Decision:
    """`now_s`: seconds of any clock that does not go back, the same for all decisions."""
    reports = [report for view in pools.values() for report in view.reports]
    slowness = learned_slowness(memory.slowness, cost, reports)
    decisions, memories = {}, {}
    known = {
        name: _noticed(memory.pools.get(name, PoolMemory()), view, now_s) for name, view in pools.items()
    }
    terms: dict[str, dict[str, float]] = {}
    careful: dict[str, dict[str, float]] = {}
    for name, view in pools.items():
        load = _load(view, pools)
        feedback = (
            measured_terms(load, view, targets) if now_s - known[name].changed_s >= targets.settle_s else {}
        )
        terms[name] = _terms(view, load, pools, targets, cost, slowness) | feedback
        careful[name] = _terms(view, load.times(_MARGIN), pools, targets, cost, slowness) | feedback
        if known[name].busy_s is None or view.num_wanting or not load.is_idle:
            known[name] = replace(known[name], busy_s=now_s)
    needs, careful_needs = _in_ratio(pools, terms, targets), _in_ratio(pools, careful, targets)
    for name, view in pools.items():
        target, reason, after = _damped(view, needs[name], careful_needs[name], known[name], targets, now_s)
        memories[name] = replace(after, target=target)
        decisions[name] = PoolDecision(
            before=view.target, target=target, needed=needs[name], terms=terms[name], reason=reason
        )
    return Decision(pools=decisions, memory=Memory(pools=memories, slowness=slowness))


def _noticed(known: PoolMemory, view: PoolView, now_s: float) -> PoolMemory:
    """The memory with a change that somebody else made: Serve itself, for a pool at zero that is wanted, or a
    person who deployed other bounds."""
    if known.target is None or known.target == view.target:
        return known
    return _turned(known, 1 if view.target > known.target else -1, now_s)


def _turned(known: PoolMemory, direction: int, now_s: float) -> PoolMemory:
    """The memory after a change."""
    return replace(
        known,
        direction=direction,
        changed_s=now_s,
        low_since_s=None,
        low_peak=0,
    )


def _load(view: PoolView, pools: Mapping[str, PoolView]) -> Load:
    """The load of a pool. What decode groups compute of prompts, for want of a prefill pool, is its work."""
    own = load_of(view.reports)
    if view.role is Role.DECODE:
        return replace(own, sequences=own.sequences + sum(report.waiting for report in view.reports))
    if view.role is Role.UNIFIED:
        return own
    decode = load_of(report for pool in pools.values() if pool.role is Role.DECODE for report in pool.reports)
    return replace(
        own,
        queue_tokens=own.queue_tokens + decode.queue_tokens,
        arriving_tokens_per_s=own.arriving_tokens_per_s + decode.arriving_tokens_per_s,
        ttft_s=decode.ttft_s,
    )


def _terms(
    view: PoolView,
    load: Load,
    pools: Mapping[str, PoolView],
    targets: ScalingTargets,
    cost: StepCost,
    slowness: float,
) -> dict[str, float]:
    """The groups that a load asks of a pool, by reason."""
    terms: dict[str, float] = {"wanting": 1.0} if view.num_wanting else {}
    has_prefill = any(pool.role is Role.PREFILL for pool in pools.values())
    if view.role is not Role.DECODE or not has_prefill:
        terms |= prompt_terms(load, cost, slowness, targets)
    if view.role is not Role.PREFILL:
        terms |= answer_terms(load, cost, slowness, targets)
    terms["memory"] = load.kv_groups / targets.max_kv_use
    return terms


def _in_ratio(
    pools: Mapping[str, PoolView], terms: Mapping[str, dict[str, float]], targets: ScalingTargets
) -> dict[str, float]:
    """What each pool needs; the one that is too small for the other is raised to the ratio."""
    needs = {name: needed(terms[name]) for name in pools}
    ratio = targets.prefill_per_decode
    prefill = next((name for name, view in pools.items() if view.role is Role.PREFILL), None)
    decode = next((name for name, view in pools.items() if view.role is Role.DECODE), None)
    if ratio is None or prefill is None or decode is None:
        return needs
    scale = max(needs[decode], needs[prefill] / ratio)
    for name, value in ((decode, scale), (prefill, scale * ratio)):
        if value > needs[name]:
            needs[name] = terms[name]["ratio"] = value
    return needs


def _damped(
    view: PoolView,
    need: float,
    careful_need: float,
    known: PoolMemory,
    targets: ScalingTargets,
    now_s: float,
) -> tuple[int, str, PoolMemory]:
    """The pool's number of groups, why, and what to remember. `careful_need`: with a margin of load."""
    assert known.busy_s is not None
    rests = now_s - known.busy_s >= targets.idle_to_zero_s
    floor = max(view.least, 0 if rests or view.target == 0 else 1)
    wanted = _bounded(math.ceil(need - 1e-9), floor, view.most)
    if wanted >= view.target:
        known = replace(known, low_since_s=None, low_peak=0)
        if wanted == view.target:
            return view.target, "at the most" if need > view.most else "enough", known
        return _changed(view.target, wanted, known, targets, now_s)
    careful = min(_bounded(math.ceil(careful_need - 1e-9), floor, view.most), view.target)
    if careful == view.target:
        return view.target, "enough, without margin", replace(known, low_since_s=None, low_peak=0)
    since = now_s if known.low_since_s is None else known.low_since_s
    known = replace(known, low_since_s=since, low_peak=max(known.low_peak, careful))
    wait_s = targets.scale_down_after_s - (now_s - since)
    goes_to_zero = careful == 0 and rests  # it has been idle for long enough already
    if wait_s > 0 and not goes_to_zero:
        return view.target, f"fewer would do, waiting {wait_s:.0f} s", known
    return _changed(view.target, careful if goes_to_zero else known.low_peak, known, targets, now_s)


def _changed(
    before: int, after: int, known: PoolMemory, targets: ScalingTargets, now_s: float
) -> tuple[int, str, PoolMemory]:
    """The change, unless it came too soon after one the other way."""
    if after == before:
        return before, "enough", known
    direction = 1 if after > before else -1
    is_reversal = known.direction == -direction
    wait_s = targets.min_reversal_s - (now_s - known.changed_s)
    if is_reversal and wait_s > 0:
        return before, f"{'up' if direction > 0 else 'down'} in {wait_s:.0f} s, after the last change", known
    return after, "up" if direction > 0 else "down", _turned(known, direction, now_s)


def _bounded(value: int, least: int, most: int) -> int:
    return min(max(value, least), most)
