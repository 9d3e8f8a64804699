"""Runs a step by letting its predicted time pass: an `Executor` without a model.

Every row that is asked for a token gets the same one. A request that is to have n tokens says so by
`max_tokens` and `ignore_eos`.
"""

from __future__ import annotations

from collections.abc import Callable

from cluster.figures.step_cost import StepCost
from cluster.figures.step_shape import shape_of
from cluster.simulate.world import World
from workers.engine.proposals import DraftHeads, DraftModel
from workers.engine.step import Sampled, SliceResult, StepPlan, StepResult

TOKEN = 0
_SAMPLED = SliceResult(sampled=(Sampled(token_id=TOKEN),))
_COMPUTED = SliceResult()


class CostExecutor:
    """Implements `workers.engine.step.Executor`, and is the clock of its engine: while a step runs, the
    engine's time is that of the step's end."""

    def __init__(self, *, world: World, cost: Callable[[], StepCost], num_blocks: int) -> None:
        """cost: of the step that begins now."""
        self._world = world
        self._cost = cost
        self._num_blocks = num_blocks
        self._step_end_s: float | None = None

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def draft_model(self) -> DraftModel | None:
        """There is none."""
        return None

    @property
    def draft_heads(self) -> DraftHeads | None:
        """There are none."""
        return None

    @property
    def has_run(self) -> bool:
        """Whether a step has been computed since settle(): what happens now belongs to its end."""
        return self._step_end_s is not None

    def clock(self) -> float:
        """The engine's time, seconds."""
        return self._world.now_s if self._step_end_s is None else self._step_end_s

    def settle(self) -> float:
        """The step has been taken in; returns when it ends."""
        end_s, self._step_end_s = self._step_end_s, None
        return self._world.now_s if end_s is None else end_s

    def execute(self, plan: StepPlan) -> StepResult:
        """Lets the step's time pass."""
        self._step_end_s = self._world.now_s + self._cost().seconds(shape_of(plan))
        return StepResult(slices=[_COMPUTED if piece.sample is None else _SAMPLED for piece in plan.slices])

    def close(self) -> None:
        """Nothing is held."""
