"""How many groups the load asks for, by the step-cost model: a fraction for each reason, all of them kept.

    queue     prompt tokens that wait, to be computed within `drain_s`
    arrivals  prompt tokens that come, at the rate of the last seconds
    decode    so many that a step with an even share of the sequences keeps the TPOT target
    memory    KV blocks held, over the share that may be
    ttft, tpot  what was measured, when it misses its target though the model finds enough groups

The model's seconds are multiplied by `slowness`, measured over predicted steps: a cost that was calibrated
on another machine is right up to that factor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from cluster.figures.step_cost import DEFAULT_STEP_TOKENS, StepCost, StepShape
from cluster.scaling.targets import ScalingTargets
from cluster.scaling.view import PoolView
from workers.data_plane.signals import GroupSignals
from workers.types import Role

_SMOOTHING = 0.2  # weight of the newest measurement of slowness
_MIN_SLOWNESS, _MAX_SLOWNESS = 0.05, 20.0
_MAX_BUSY = 0.9  # share of its time that a decoding group spends on prompts, at most
_MAX_GROUPS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The sum over groups of what decides."""

    queue_tokens: float
    arriving_tokens_per_s: float
    sequences: float  # running; of decode groups, also those that are on their way from prefill groups
    mean_context: float  # tokens of a running one
    kv_groups: float  # groups' worth of KV blocks held
    ttft_s: float  # the worst group's mean
    step_s: float  # likewise

    @property
    def is_idle(self) -> bool:
        """Nothing runs or waits, and nothing has come of late."""
        return not (self.queue_tokens or self.sequences or self.arriving_tokens_per_s)

    def times(self, factor: float) -> Load:
        """The same with so much more work."""
        return replace(
            self,
            queue_tokens=self.queue_tokens * factor,
            arriving_tokens_per_s=self.arriving_tokens_per_s * factor,
            sequences=self.sequences * factor,
            kv_groups=self.kv_groups * factor,
        )


def load_of(reports: Iterable[GroupSignals]) -> Load:
    """Over all groups of a pool, or of several."""
    groups = list(reports)
    running = sum(group.running for group in groups)
    return Load(
        queue_tokens=sum(group.queue_tokens for group in groups),
        arriving_tokens_per_s=sum(group.arriving_tokens_per_s for group in groups),
        sequences=running,
        mean_context=sum(group.context_tokens for group in groups) / running if running else 0.0,
        kv_groups=sum(group.kv_use for group in groups),
        ttft_s=max((group.ttft_s for group in groups), default=0.0),
        step_s=max((group.step_s for group in groups if group.running), default=0.0),
    )


def learned_slowness(known: float, cost: StepCost, reports: Sequence[GroupSignals]) -> float:
    """The known factor, moved towards what the busy groups' steps took."""
    predicted = measured = 0.0
    for report in reports:
        if report.step_s <= 0.0:  # no steps of late
            continue
        shape = StepShape(
            prefill_tokens=round(report.step_prompt_tokens),
            decode_rows=max(round(report.step_rows), 1),
            context_tokens=round(report.context_tokens),
        )
        predicted += cost.seconds(shape)
        measured += report.step_s
    if not predicted:
        return known
    moved = known + _SMOOTHING * (measured / predicted - known)
    return min(max(moved, _MIN_SLOWNESS), _MAX_SLOWNESS)


def prompt_terms(load: Load, cost: StepCost, slowness: float, targets: ScalingTargets) -> dict[str, float]:
    """Groups that computing prompts in time asks for."""
    rate = cost.prefill_tokens_per_s(DEFAULT_STEP_TOKENS) / slowness * targets.headroom
    return {
        "queue": load.queue_tokens / targets.drain_s / rate,
        "arrivals": load.arriving_tokens_per_s / rate,
    }


def answer_terms(load: Load, cost: StepCost, slowness: float, targets: ScalingTargets) -> dict[str, float]:
    """Groups that giving tokens in time asks for."""
    return {
        "decode": float(_groups_for_tpot(load, cost, slowness, targets)) if load.sequences else 0.0,
    }


def _groups_for_tpot(load: Load, cost: StepCost, slowness: float, targets: ScalingTargets) -> int:
    """The fewest among which the sequences' steps are short enough, with the prompts computed between."""
    prompt_rate = cost.prefill_tokens_per_s(DEFAULT_STEP_TOKENS) / slowness
    low, high = 1, _MAX_GROUPS
    while low < high:
        groups = (low + high) // 2
        batch = math.ceil(load.sequences / groups)
        step_s = slowness * cost.decode_step_seconds(batch, load.mean_context)
        busy = min(load.arriving_tokens_per_s / groups / prompt_rate, _MAX_BUSY)
        if step_s / (1.0 - busy) <= targets.tpot_s or batch <= 1:
            high = groups
        else:
            low = groups + 1
    return low


def measured_terms(load: Load, view: PoolView, targets: ScalingTargets) -> dict[str, float]:
    """One group more than there are, for a target that is missed all the same."""
    terms = {}
    if view.role is not Role.DECODE and load.ttft_s > targets.ttft_s:
        terms["ttft"] = view.target + 1.0
    if view.role is not Role.PREFILL and load.step_s > targets.tpot_s:
        terms["tpot"] = view.target + 1.0
    return terms


def needed(terms: Mapping[str, float]) -> float:
    """Prompts and answers share a unified group's time, so those add up; the rest is the largest."""
    computing = terms.get("queue", 0.0) + terms.get("arrivals", 0.0)
    others = (value for name, value in terms.items() if name not in ("queue", "arrivals"))
    return max([computing, *others])
