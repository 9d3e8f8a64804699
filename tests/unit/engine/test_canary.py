"""The canary's prompt: asked at the start and once a minute, among others, and what ends the group."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from tests.unit.engine.toy import LIMITS, ToyExecutor, make_engine, make_request, numbers, reference
from workers.engine.canary import INTERVAL_S, Canary
from workers.engine.engine import Engine
from workers.engine.loop import EngineLoop, StepOutput
from workers.engine.step import GroupFailed, StepPlan, StepResult
from workers.types import FinishReason, GenerateRequest, TokenChunk


class Clock:
    """Time that tests move."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Damaged(ToyExecutor):
    """An executor whose log-probabilities move by `off`."""

    off = 0.0

    def execute(self, plan: StepPlan) -> StepResult:
        found = super().execute(plan)
        return replace(
            found,
            slices=[
                replace(
                    piece,
                    prompt_logprobs=[
                        replace(score, logprob=score.logprob + self.off) for score in piece.prompt_logprobs
                    ],
                )
                for piece in found.slices
            ],
        )


def proven(off: float = 0.0) -> tuple[Canary, Engine, Damaged, Clock]:
    clock = Clock()
    engine, executor = make_engine(clock=clock, make_executor=Damaged)
    assert isinstance(executor, Damaged)
    executor.off = off
    canary = Canary(LIMITS, clock)
    canary.prove(engine)
    return canary, engine, executor, clock


def ask_again(canary: Canary, engine: Engine) -> list[TokenChunk]:
    canary.ask(engine)
    others = []
    while engine.has_work():
        others += canary.take(engine.step())
        canary.judge()
    return others


def test_it_is_due_once_a_minute_and_leaves_nothing_behind() -> None:
    canary, engine, _, clock = proven()
    stats = engine.stats()
    assert (stats.active_blocks, stats.cached_blocks, engine.take_events()) == (0, 0, [])
    assert not canary.is_due
    clock.now_s = INTERVAL_S
    assert canary.is_due
    request = make_request("other", numbers(20))
    engine.add(request)
    others = ask_again(canary, engine)
    assert [token for chunk in others for token in chunk.token_ids] == reference(request)
    assert {chunk.request_id for chunk in others} == {"other"} and not canary.is_due
    engine.check_integrity()


def test_neither_totals_nor_what_is_expected_of_others_know_of_it() -> None:
    canary, engine, executor, _ = proven()
    for _ in range(3):
        ask_again(canary, engine)
    executor.off = float("nan")
    assert ask_again(canary, engine) == []
    executor.spoil = lambda piece: "not a number"
    with pytest.raises(GroupFailed):
        ask_again(canary, engine)
    stats, fresh = engine.stats(), make_engine()[0].stats()
    assert stats.num_steps == 6
    assert replace(stats, num_steps=0) == fresh
    for tested in (engine, make_engine()[0]):
        executor.spoil = lambda piece: None
        tested.add(make_request("other", numbers(5), max_tokens=200))
        while tested.has_work():
            tested.step()
        assert tested._scheduler.estimate.mean == 128 + (200 - 128) / 5  # of 128 that count as four


@pytest.mark.parametrize("off", [float("nan"), float("inf")])
def test_a_group_without_finite_numbers_does_not_start(off: float) -> None:
    with pytest.raises(GroupFailed, match="gave log-probabilities that are not finite numbers"):
        proven(off)


def test_an_error_ends_the_start() -> None:
    engine, executor = make_engine()
    executor.spoil = lambda piece: "not a number"
    with pytest.raises(GroupFailed, match="the canary prompt failed: "):
        Canary(LIMITS, Clock()).prove(engine)


def test_a_refusal_at_the_start_says_why() -> None:
    engine, _ = make_engine(max_model_len=4)
    with pytest.raises(GroupFailed, match=r"^the canary prompt was refused: The context length is 4 tokens"):
        Canary(LIMITS, Clock()).prove(engine)


def test_rounding_is_no_damage_and_damage_is_told() -> None:
    canary, engine, executor, _ = proven()
    executor.off = 0.05
    assert ask_again(canary, engine) == []
    executor.off = -0.5
    assert ask_again(canary, engine) == []
    with pytest.raises(GroupFailed, match=r"by 0\.\d+ nats in the mean: weights or device are damaged"):
        ask_again(canary, engine)


@pytest.mark.parametrize("off", [-0.5, float("nan")])
def test_a_wrong_answer_is_asked_for_again_at_once(off: float, caplog: pytest.LogCaptureFixture) -> None:
    canary, engine, executor, _ = proven()
    for _ in range(2):  # a right one between them: they are not in a row
        executor.off = off
        assert ask_again(canary, engine) == [] and canary.is_due
        executor.off = 0.0
        assert ask_again(canary, engine) == [] and not canary.is_due
    assert [message.endswith("; it is asked again") for message in caplog.messages] == [True, True]


def test_one_that_finds_no_room_is_asked_later() -> None:
    clock = Clock()
    engine, _ = make_engine(clock=clock, max_waiting=1)
    canary = Canary(LIMITS, clock)
    canary.prove(engine)
    clock.now_s = INTERVAL_S
    engine.add(make_request("other", numbers(20)))
    canary.ask(engine)
    assert not canary.is_due
    clock.now_s = 2 * INTERVAL_S
    assert canary.is_due


def test_models_of_few_positions_and_ids() -> None:
    engine, executor = make_engine(max_model_len=4)
    Canary(replace(LIMITS, max_model_len=4, vocab_size=2), Clock()).prove(engine)
    assert executor.plans[0].slices[0].token_ids == (1, 0, 1)


def end_by_damage(request: GenerateRequest) -> tuple[EngineLoop, list[StepOutput]]:
    """A loop that has this request when its group begins to compute wrongly, until it has ended."""
    canary, engine, executor, clock = proven()
    outputs: list[StepOutput] = []
    has_ended = threading.Event()

    def hear(output: StepOutput) -> None:
        outputs.append(output)
        if output.failure is not None:
            has_ended.set()

    loop = EngineLoop(engine, hear, canary)
    executor.off = 3.0
    clock.now_s = INTERVAL_S
    loop.submit(request)
    loop.start()
    assert has_ended.wait(10)
    loop.stop(10)
    return loop, outputs


def test_the_loop_asks_by_itself_and_ends_with_the_group() -> None:
    loop, outputs = end_by_damage(make_request("other", numbers(20), max_tokens=900))
    assert outputs[-1].failure is not None and "canary prompt gave other" in outputs[-1].failure
    chunks = [chunk for output in outputs for chunk in output.chunks]
    assert {chunk.request_id for chunk in chunks} == {"other"}
    assert [chunk.error_code for chunk in chunks if chunk.finish_reason] == ["group_distrusted"]
    loop.submit(make_request("late", numbers(20)))
    assert [chunk.error_code for chunk in outputs[-1].chunks] == ["group_distrusted"]


def test_what_the_step_of_a_wrong_answer_gave_to_others_is_heard_of() -> None:
    request = make_request("other", numbers(20), max_tokens=2)  # one for each answer
    _, outputs = end_by_damage(request)
    chunks = [chunk for output in outputs for chunk in output.chunks]
    assert [token for chunk in chunks for token in chunk.token_ids] == reference(request)
    assert [chunk.finish_reason for chunk in chunks] == [None, FinishReason.LENGTH]
    assert outputs[-1].failure is not None and outputs[-1].chunks == tuple(chunks[-1:])
