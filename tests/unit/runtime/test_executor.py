"""Rank 0 of several when something raises: what ends the group, and what only a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest
import torch

from tests.unit.runtime.factories import piece, task
from workers.config import CacheConfig, ScheduleConfig, SpeculativeConfig
from workers.engine.engine import Engine
from workers.engine.request import EngineLimits
from workers.engine.step import GroupFailed, StepPlan
from workers.kernels import MAX_LOGIT_ROWS, NOT_FINITE, Draw, Drawn, StepMessage, TorchKernels, header_of
from workers.runtime.drawn_ids import ArrivingIds
from workers.runtime.executor import GroupExecutor
from workers.runtime.leader_link import LeaderLink
from workers.runtime.runner import ModelRunner
from workers.types import GenerateRequest, RequestId, SamplingParams

VOCAB_SIZE = 8


class FakeRunner:
    """Counts passes; the best token is always 5."""

    block_size = 4
    num_blocks = 1000
    kernels = TorchKernels()

    def __init__(self, fault: Exception | None = None) -> None:
        self.num_passes = 0
        self.num_rows: list[int] = []
        self.fault = fault

    def start(self, message: StepMessage, draws: Sequence[Draw]) -> ArrivingIds:
        return ArrivingIds(torch.tensor(self.run(message, draws).ids), None)

    def run(self, message: StepMessage, draws: Sequence[Draw], *, ids_only: bool = False) -> Drawn:
        self.num_passes += 1
        self.num_rows.append(header_of(message).num_logit_rows)
        if self.fault is not None:
            raise self.fault
        logits = torch.zeros(header_of(message).num_logit_rows, VOCAB_SIZE)
        logits[:, 5] = 1.0
        return Drawn(logits, self.kernels.draw(logits, draws, only_finite=True))


class FakeLink:
    """Followers that agree with everything."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_ended = 0

    def send_step(self, body: bytes) -> None:
        self.num_steps += 1

    def end_step(self) -> None:
        self.num_ended += 1

    def explain(self, error: Exception, wait_s: float) -> GroupFailed:
        return GroupFailed(f"explained: {error}")


def executor(runner: FakeRunner, link: FakeLink) -> GroupExecutor:
    return GroupExecutor(cast(ModelRunner, runner), cast(LeaderLink, link), on_close=lambda: None)


def test_a_fault_of_the_forward_pass_ends_the_group() -> None:
    with pytest.raises(GroupFailed, match="explained: no memory"):
        executor(FakeRunner(RuntimeError("no memory")), FakeLink()).execute(
            StepPlan(number=1, slices=(piece([1], blocks=[0], sample=task()),))
        )


def test_a_request_that_cannot_be_sampled_leaves_the_ranks_in_step() -> None:
    runner, link = FakeRunner(), FakeLink()
    group = executor(runner, link)
    num_tokens = 1200  # more rows of logits than one pass makes: the followers run three
    poison = piece([1] * num_tokens, blocks=range(300), targets=[VOCAB_SIZE] * num_tokens)
    with pytest.raises((IndexError, RuntimeError)):
        group.execute(StepPlan(number=1, slices=(poison,)))
    assert (link.num_steps, runner.num_passes) == (1, 3)
    good = piece([1], blocks=[0], sample=task())
    (result,) = group.execute(StepPlan(number=2, slices=(good,))).slices
    assert [found.token_id for found in result.sampled] == [5]


def test_of_one_rank_a_fault_is_the_requests() -> None:
    """The next step begins anew: nobody else has been given anything."""
    runner = FakeRunner(RuntimeError("no memory"))
    alone = GroupExecutor(cast(ModelRunner, runner))
    plan = StepPlan(number=1, slices=(piece([1], blocks=[0], sample=task()),))
    with pytest.raises(RuntimeError, match="no memory"):
        alone.execute(plan)
    runner.fault = None
    (result,) = alone.execute(plan).slices
    assert [found.token_id for found in result.sampled] == [5]
    alone.close()


def test_a_step_with_guesses_is_one_pass() -> None:
    """More rows of logits than a pass makes would have the whole step computed twice."""
    runner = FakeRunner()
    schedule = ScheduleConfig(max_step_tokens=2048, max_running=400)
    engine = Engine(
        limits=EngineLimits(
            vocab_size=VOCAB_SIZE, max_model_len=64, eos_token_ids=(), max_pass_rows=MAX_LOGIT_ROWS
        ),
        cache=CacheConfig(block_size=FakeRunner.block_size),
        schedule=schedule,
        executor=GroupExecutor(cast(ModelRunner, runner)),
        speculative=SpeculativeConfig(method="prompt_lookup", max_draft_tokens=4),
        clock=lambda: 0.0,
    )
    for number in range(150):
        sampling = SamplingParams(max_tokens=20, temperature=0.0)
        engine.add(
            GenerateRequest(request_id=RequestId(f"r{number}"), prompt_token_ids=(5,) * 3, sampling=sampling)
        )
    while engine.has_work():
        engine.step()
    stats = engine.stats()
    assert stats.drafted_tokens_total > 1000
    assert max(runner.num_rows) > MAX_LOGIT_ROWS - 5
    assert runner.num_passes == stats.num_steps


def two_rows() -> StepPlan:
    chunk = piece([1, 2], blocks=[7])
    return StepPlan(
        number=1,
        slices=(piece([1], blocks=[0], sample=task()), chunk, piece([2], blocks=[1], sample=task())),
    )


def test_steps_are_open_from_their_start_until_their_results() -> None:
    link = FakeLink()
    group = executor(FakeRunner(), link)
    first, second = group.start(two_rows()), group.start(two_rows())
    assert (link.num_steps, link.num_ended) == (2, 0)
    for number, step in enumerate((first, second), 1):
        results = step.result().slices
        assert [[found.token_id for found in result.sampled] for result in results] == [[5], [], [5]]
        assert link.num_ended == number


def test_a_fault_of_a_started_step_ends_the_group() -> None:
    with pytest.raises(GroupFailed, match="explained: no memory"):
        executor(FakeRunner(RuntimeError("no memory")), FakeLink()).start(two_rows())


def test_a_started_step_without_numbers_is_an_error_of_its_slice() -> None:
    class Nowhere(FakeRunner):
        def start(self, message: StepMessage, draws: Sequence[Draw]) -> ArrivingIds:
            return ArrivingIds(torch.tensor([NOT_FINITE, 3]), None)

    first, chunk, last = executor(Nowhere(), FakeLink()).start(two_rows()).result().slices
    assert (first.error_code, first.sampled) == ("numerical_error", ()) and first.error is not None
    assert (chunk.error, last.error, [found.token_id for found in last.sampled]) == (None, None, [3])
