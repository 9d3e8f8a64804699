"""What steps were and what holds them up: counted after each, told about once a second.

A step that neither the arithmetic nor the reading of memory explains, by the ceilings of the machine, is held
up by what is around it: launches, synchronisation, sampling, the scheduler, another process on its core.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

from workers.engine.step import StepPlan
from workers.engine.work import ModelWork, StepWork, step_work
from workers.histogram import HistogramCell
from workers.report import STEP_S, STEP_TOKENS, Bound, StepCounts, StepKind, Usage

PERIOD_S: Final = 1.0  # between two reports
WINDOW_S: Final = 10.0  # steps that ended longer ago say nothing of now
_IDLE_SHARE: Final = 0.02  # of the window in steps; with less there is nothing to hold up
_EXPLAINED: Final = 0.5  # least share of a ceiling that makes it what a step waits for
_NO_WORK: Final = StepWork(0.0, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """What the machines of a group can do at most, measured."""

    flop_per_s: float
    read_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MeteredModel:
    """What it takes to say how well a group uses its machines."""

    work: ModelWork
    ceilings: Ceilings


class _Step(NamedTuple):
    ended_s: float
    seconds: float
    work: StepWork


class StepMeter:
    """Of one engine; used by its thread."""

    def __init__(self, model: MeteredModel | None, clock: Callable[[], float]) -> None:
        """model None: arithmetic and bytes are not counted, and steps count as held up by neither."""
        self._model = model
        self._clock = clock
        self._began_s: float | None = None  # the first step
        self._reported_s = float("-inf")
        self._has_news = True
        self._cells = {kind: (HistogramCell(STEP_TOKENS), HistogramCell(STEP_S)) for kind in StepKind}
        self._recent: deque[_Step] = deque()
        self.flop_total = 0.0
        self.read_bytes_total = 0.0
        self.ceilings = model.ceilings if model is not None else Ceilings(flop_per_s=0, read_bytes_per_s=0)

    def observe(self, plan: StepPlan, num_decoding: int, *, ended_s: float, seconds: float) -> None:
        """A step has been computed; its first `num_decoding` slices are of sequences in decode."""
        kind = StepKind.MIXED
        if num_decoding == len(plan.slices):
            kind = StepKind.DECODE
        elif num_decoding == 0:
            kind = StepKind.PREFILL
        num_tokens, taken_s = self._cells[kind]
        num_tokens.observe(sum([len(piece.token_ids) for piece in plan.slices]))
        taken_s.observe(seconds)
        work = step_work(self._model.work, plan) if self._model is not None else _NO_WORK
        self.flop_total += work.flop
        self.read_bytes_total += work.read_bytes
        self._recent.append(_Step(ended_s, seconds, work))
        if self._began_s is None:
            self._began_s = ended_s - seconds
        self._has_news = True

    def is_due(self, *, is_idle: bool) -> bool:
        """Whether a report is to be made now; the last one before a pause must not wait for the next step,
        and those after it say that the pause lasts."""
        if not (self._has_news or self._recent):
            return False
        return (is_idle and self._has_news) or self._clock() - self._reported_s >= PERIOD_S

    def steps(self) -> tuple[StepCounts, ...]:
        """For a report, which is being made now."""
        self._reported_s, self._has_news = self._clock(), False
        return tuple(
            StepCounts(kind=kind, tokens=num_tokens.counts_now(), seconds=taken_s.counts_now())
            for kind, (num_tokens, taken_s) in self._cells.items()
        )

    def usage(self) -> Usage:
        """Of the steps that ended in the last WINDOW_S."""
        now_s = self._clock()
        while self._recent and now_s - self._recent[0].ended_s > WINDOW_S:
            self._recent.popleft()
        busy_s = sum(step.seconds for step in self._recent)
        flop = sum(step.work.flop for step in self._recent)
        read_bytes = sum(step.work.read_bytes for step in self._recent)
        since_s = now_s - self._began_s if self._began_s is not None else 0.0
        window_s = max(min(WINDOW_S, since_s), busy_s)
        return usage_of(busy_s, window_s, StepWork(flop, read_bytes), self.ceilings)


def usage_of(busy_s: float, window_s: float, work: StepWork, ceilings: Ceilings) -> Usage:
    """How near `work`, done in `busy_s` of the last `window_s`, is to the ceilings, and what held it up."""
    if busy_s <= 0 or window_s <= 0:
        return Usage()
    compute = work.flop / busy_s / ceilings.flop_per_s if ceilings.flop_per_s else 0.0
    reading = work.read_bytes / busy_s / ceilings.read_bytes_per_s if ceilings.read_bytes_per_s else 0.0
    bound = Bound.OVERHEAD
    if busy_s / window_s < _IDLE_SHARE:
        bound = Bound.IDLE
    elif max(compute, reading) >= _EXPLAINED:
        bound = Bound.COMPUTE if compute >= reading else Bound.BANDWIDTH
    return Usage(bound=bound, busy_share=busy_s / window_s, compute_share=compute, bandwidth_share=reading)
