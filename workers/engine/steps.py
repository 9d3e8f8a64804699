"""Has the steps of an engine computed: one after the other, or the next one started before the results of the
one before it (`workers.engine.ahead`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

from workers.engine.ahead import Flight
from workers.engine.block_pool import BlockPool
from workers.engine.execution import Outcomes, run_apart, run_plan, slices_of
from workers.engine.plan import ScheduledStep
from workers.engine.scheduler import Scheduler
from workers.engine.sequence import Sequence, SequenceState
from workers.engine.step import Executor, GroupFailed, StartedStep, StepPlan, StepStarter

_MAX_IN_FLIGHT = 2  # steps, before the results of the older are taken
_MOST_FAILED_AHEAD = 3  # in a row

_log = logging.getLogger(__name__)


class ComputedStep(NamedTuple):
    """A step and what came of each of its slices."""

    scheduled: ScheduledStep
    outcomes: Outcomes
    began_s: float  # its planning


class Steps:
    """Used by the engine's thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        pool: BlockPool,
        executor: Executor,
        starter: StepStarter | None,
        on_planned: Callable[[ScheduledStep], None],
    ) -> None:
        """starter: to plan ahead, until that has failed too often in a row; None: never.
        on_planned is called before a step begins."""
        self._scheduler = scheduler
        self._pool = pool
        self._executor = executor
        self._starter = starter
        self._on_planned = on_planned
        self._flights = scheduler.flights
        self._ended_s = float("-inf")  # of the step whose results came last
        self._has_failed = False
        self._num_failed_ahead = 0  # in a row

    @property
    def are_in_flight(self) -> bool:
        """Whether a step has begun whose results have not been taken."""
        return bool(self._flights)

    def next(self, now_s: float) -> ComputedStep | None:
        """The results of the oldest step in flight, or of a new one; None when there is nothing to do. What
        can be started before them has begun. Raises GroupFailed."""
        computed: ComputedStep | None = None
        try:
            while computed is None:
                computed = self._begin(now_s)
                if computed is None and not self._flights:
                    return None
                computed = computed or self._land()
        except GroupFailed:
            self._has_failed = True
            raise
        outcomes = computed.outcomes
        if isinstance(outcomes[0], Exception) and all(isinstance(each, Exception) for each in outcomes):
            # Its sequence will go, and nobody knows whether the step came to the zeroing.
            self._pool.zero(computed.scheduled.plan.zero_blocks)
        return computed

    def end(self, step: ComputedStep, now_s: float) -> float:
        """Its results have been taken. The seconds that it took: since its planning, or the end of the step
        before it if that came later."""
        before_s, self._ended_s = self._ended_s, now_s
        return now_s - max(step.began_s, before_s)

    def drop(self) -> None:
        """Throws away the steps in flight. Waits for them, unless the group has failed."""
        while self._flights:
            flight = self._flights.land()
            try:
                if not self._has_failed:
                    flight.result()
            except Exception as error:
                _log.warning("step %d is dropped: %r", flight.scheduled.plan.number, error)

    def _begin(self, now_s: float) -> ComputedStep | None:
        """Plans and starts steps; returns the one that had to be run at once."""
        while self._flights.can_grow(_MAX_IN_FLIGHT):
            scheduled = self._scheduler.schedule()
            if scheduled is None:
                break
            self._on_planned(scheduled)
            if self._starter is None or not self._flights.can_depart(scheduled):
                assert not self._flights, "a step was planned ahead that cannot be started"
                return ComputedStep(scheduled, run_plan(self._executor, scheduled.plan), now_s)
            started = _start(self._starter, scheduled.plan)
            self._flights.depart(Flight(scheduled, now_s, started, is_ahead=bool(self._flights)))
        return None

    def _land(self) -> ComputedStep | None:
        """The oldest step; None when it was planned ahead and came to nothing."""
        flight, *later = self._flights
        plan = flight.scheduled.plan
        outcomes: Outcomes
        try:
            outcomes = slices_of(flight.result(), plan)
        except GroupFailed:
            raise
        except Exception as error:
            for each in later:  # the ids that it takes from this one are not there
                each.fail(error)
            if flight.is_ahead:
                self._note_failed_ahead(flight, error)
                self._plan_again()
                return None
            outcomes = run_apart(self._executor, plan, error)
        else:
            if flight.is_ahead:
                self._num_failed_ahead = 0
        self._flights.land()
        return ComputedStep(flight.scheduled, outcomes, flight.began_s)

    def _note_failed_ahead(self, flight: Flight, error: Exception) -> None:
        """Computed after its results are known, the same may do well: what fails may be the way ahead itself,
        which would have all that run computed again, and again."""
        self._num_failed_ahead += not flight.lacks_ids
        _log.warning(
            "step %d, planned ahead, is planned again: %r",
            *(flight.scheduled.plan.number, error),
            exc_info=error if self._num_failed_ahead <= 1 else None,
        )
        if self._num_failed_ahead >= _MOST_FAILED_AHEAD:
            self._starter = None
            _log.error(
                "no step is planned ahead any more until this group is started anew: %d failures in a row, "
                "the last one %r",
                *(self._num_failed_ahead, error),
            )

    def _plan_again(self) -> None:
        """No step in flight has come to anything: what they were to compute is begun anew."""
        sequences: dict[Sequence, None] = {}
        while self._flights:
            scheduled = self._flights.land().scheduled
            assert not scheduled.plan.zero_blocks, "a step that was planned ahead was to zero blocks"
            sequences |= dict.fromkeys(scheduled.sequences)
        for sequence in sequences:
            if sequence.state is not SequenceState.FINISHED:
                self._scheduler.send_back(sequence)


def _start(starter: StepStarter, plan: StepPlan) -> StartedStep | Exception:
    try:
        return starter.start(plan)
    except GroupFailed:
        raise
    except Exception as error:
        return error
