"""The two executors: one rank alone, and rank 0 of several.

A step on several ranks: rank 0 flattens the plan, sends it to all followers in one message, and computes it
like every other rank; logits come together on rank 0, which samples. A step that raises on rank 0 after it
was sent leaves the ranks out of step, so it ends the group.
"""

from __future__ import annotations

from collections.abc import Callable

from workers.engine.step import StepPlan, StepResult
from workers.runtime.leader_link import LeaderLink
from workers.runtime.results import ResultBuilder
from workers.runtime.runner import ModelRunner
from workers.runtime.step_codec import StepArrays, arrays_of, encode

_EXPLAIN_WAIT_S = 1.0  # for the watchdog to find out who died


class LocalExecutor:
    """Runs plans in this process: a group of one rank. Implements `workers.engine.step.Executor`."""

    def __init__(self, runner: ModelRunner, kv_bytes_per_block: int) -> None:
        self._runner = runner
        self._kv_bytes_per_block = kv_bytes_per_block

    @property
    def runner(self) -> ModelRunner:
        """Of this process: rank 0's decoder and pool."""
        return self._runner

    @property
    def num_blocks(self) -> int:
        return self._runner.num_blocks

    @property
    def kv_bytes_per_block(self) -> int:
        return self._kv_bytes_per_block

    def execute(self, plan: StepPlan) -> StepResult:
        return _compute(self._runner, plan, arrays_of(plan, self._runner.block_size))

    def close(self) -> None:
        """Nothing to end: the process holds all there is."""


class GroupExecutor:
    """Runs plans on all ranks; lives on rank 0. Implements `workers.engine.step.Executor`."""

    def __init__(
        self,
        runner: ModelRunner,
        link: LeaderLink,
        kv_bytes_per_block: int,
        *,
        on_close: Callable[[], None],
    ) -> None:
        self._runner = runner
        self._link = link
        self._kv_bytes_per_block = kv_bytes_per_block
        self._on_close = on_close

    @property
    def runner(self) -> ModelRunner:
        """Of this process: rank 0's decoder and pool."""
        return self._runner

    @property
    def num_blocks(self) -> int:
        return self._runner.num_blocks

    @property
    def kv_bytes_per_block(self) -> int:
        return self._kv_bytes_per_block

    def execute(self, plan: StepPlan) -> StepResult:
        arrays = arrays_of(plan, self._runner.block_size)
        self._link.send_step(encode(arrays))
        try:
            return _compute(self._runner, plan, arrays)
        except Exception as error:
            raise self._link.explain(error, _EXPLAIN_WAIT_S) from error

    def close(self) -> None:
        self._on_close()


def _compute(runner: ModelRunner, plan: StepPlan, arrays: StepArrays) -> StepResult:
    builder = ResultBuilder(plan)
    for part in arrays.passes():
        logits = runner.run(part)
        assert logits is not None, "rank 0 gets the logits"
        builder.take(logits)
    return builder.results()
