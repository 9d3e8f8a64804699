"""Steps from rank 0, which may be the only one; steps can also be started without waiting for them.

A step on several ranks: rank 0 flattens the plan, sends it to all followers in one message, and computes it
like every other rank; logits come together on rank 0, which samples. A forward pass that raises on rank 0
leaves the ranks out of step, so it ends the group. What raises while results are made from the logits, on
rank 0 alone, leaves them in step: it goes to the engine, which finds the request that is to blame.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from workers.engine.proposals import DraftHeads, DraftModel
from workers.engine.step import StartedStep, StepPlan, StepResult
from workers.kernels import MAX_LOGIT_ROWS, Draw, Drawn, StepMessage, passes
from workers.runtime.drawn_ids import ArrivingIds
from workers.runtime.leader_link import LeaderLink
from workers.runtime.medusa import MedusaRunner
from workers.runtime.results import IdResults, StepResults, results_of
from workers.runtime.runner import ModelRunner
from workers.runtime.step_codec import encode, encode_moves

_EXPLAIN_WAIT_S = 1.0  # for the watchdog to find out who died


class GroupExecutor:
    """Runs plans on all ranks; lives on rank 0. Implements `workers.engine.step.Executor` and StepStarter."""

    def __init__(
        self,
        runner: ModelRunner,
        link: LeaderLink | None = None,
        *,
        on_close: Callable[[], None] = lambda: None,
        draft_model: DraftModel | None = None,
        draft_heads: MedusaRunner | None = None,
    ) -> None:
        """link: to the other ranks; None: this is the only one. on_close: ends what the group has started."""
        self._runner = runner
        self._draft_model = draft_model
        self._draft_heads = draft_heads
        self._link = link
        self._on_close = on_close

    @property
    def runner(self) -> ModelRunner:
        """Of this process: rank 0's decoder and pool."""
        return self._runner

    @property
    def num_blocks(self) -> int:
        return self._runner.num_blocks

    @property
    def draft_model(self) -> DraftModel | None:
        return self._draft_model

    @property
    def draft_heads(self) -> DraftHeads | None:
        return self._draft_heads

    def execute(self, plan: StepPlan) -> StepResult:
        message = encode(plan, self._runner.block_size)
        builder = results_of(plan, self._runner.kernels)  # first: what raises here reaches no follower
        self._send(message)
        try:
            results = self._compute(plan, message, builder)
            if builder.has_trees and (moves := encode_moves(plan, results, self._runner.block_size)):
                self._end_step()
                self._send(moves)
                self._run(moves, ())
        finally:
            self._end_step()
        return results

    def start(self, plan: StepPlan) -> StartedStep:
        message = encode(plan, self._runner.block_size)
        builder = IdResults(plan)
        self._send(message)
        with self._explained():
            ids = self._runner.start(message, builder.draws)
        return _Started(builder, partial(self._wait, ids))

    def close(self) -> None:
        self._on_close()

    def _send(self, message: StepMessage) -> None:
        if self._link is not None:
            self._link.send_step(message)

    def _end_step(self) -> None:
        if self._link is not None:
            self._link.end_step()

    def _compute(self, plan: StepPlan, message: StepMessage, builder: StepResults) -> StepResult:
        """Runs all passes, also after a fault in the results of one: the other ranks run them too."""
        fault: Exception | None = None
        first = 0
        parts = passes(message)
        for part in parts:
            draws = builder.draws[first : first + MAX_LOGIT_ROWS]
            first += len(draws)
            drawn = self._run(part, draws, ids_only=builder.ids_only)
            assert drawn is not None, "rank 0 gets the logits"
            if fault is None:
                try:
                    builder.take(drawn)
                except Exception as error:
                    fault = error
            if self._draft_heads is not None:
                self._draft_heads.keep(plan, drawn.hidden if len(parts) == 1 else None)
        if fault is not None:
            raise fault
        return builder.results()

    def _run(self, part: StepMessage, draws: Sequence[Draw], *, ids_only: bool = False) -> Drawn | None:
        if self._link is None:
            return self._runner.run(part, draws, ids_only=ids_only)
        with self._explained():
            return self._runner.run(part, draws, ids_only=ids_only)

    def _wait(self, ids: ArrivingIds) -> list[int]:
        try:
            with self._explained():
                return ids.wait()
        finally:
            self._end_step()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """With other ranks a fault ends the group, and may be that of another rank."""
        try:
            yield
        except Exception as error:
            if self._link is None:
                raise
            raise self._link.explain(error, _EXPLAIN_WAIT_S) from error


class _Started:
    """Implements `workers.engine.step.StartedStep`."""

    def __init__(self, builder: IdResults, wait: Callable[[], list[int]]) -> None:
        self._builder = builder
        self._wait = wait

    def result(self) -> StepResult:
        self._builder.take_ids(self._wait())
        return self._builder.results()
