"""Requests that cannot go on: numbers that are none, exceptions, a dead group. Exact outcomes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.unit.engine.toy import (
    make_engine,
    make_request,
    numbers,
    reference,
    replay,
    run,
)
from workers.engine.step import GroupFailed, SequenceSlice, StepPlan
from workers.hashing import block_hashes
from workers.types import FinishReason


def _spoil(prompt: tuple[int, ...], at: int) -> Callable[[SequenceSlice], str | None]:
    def error(piece: SequenceSlice) -> str | None:
        if piece.sample is None or piece.sample.prompt_token_ids != prompt:
            return None
        return "not a finite number" if len(piece.sample.output_token_ids) == at else None

    return error


@pytest.mark.parametrize("at", [0, 3])
def test_a_numerical_error_ends_its_request_alone_and_leaves_nothing_cached(at: int) -> None:
    engine, executor = make_engine(block_size=4, max_step_tokens=8)
    bad, good = make_request("bad", numbers(14, 1), 8), make_request("good", numbers(10, 2), 8)
    executor.spoil = _spoil(bad.prompt_token_ids, at)
    engine.add(bad)
    engine.add(good)
    transcript = run(engine)
    end = transcript.last["bad", 0]
    assert (end.finish_reason, end.error_code, end.error) == (
        FinishReason.ERROR,
        "numerical_error",
        "not a finite number",
    )
    assert transcript.tokens["bad", 0] == reference(bad)[:at]
    assert transcript.tokens["good", 0] == reference(good)
    good_history = (*good.prompt_token_ids, *reference(good))[:-1]
    assert replay(engine.take_events()) == set(block_hashes(good_history, 4))
    asked = [set(plan.zero_blocks) for plan in executor.plans if plan.zero_blocks]
    spoiled = next(
        set(piece.block_table)
        for plan in reversed(executor.plans)
        for piece in plan.slices
        if piece.sample is not None and piece.sample.prompt_token_ids == bad.prompt_token_ids
    )
    assert asked == [spoiled]
    stats = engine.stats()
    assert (stats.finished_error_total, stats.finished_length_total) == (1, 1)
    executor.spoil = lambda piece: None
    engine.add(make_request("again", bad.prompt_token_ids, 8))
    again = run(engine)
    assert (again.cached("again"), again.tokens["again", 0]) == (0, reference(bad))


def test_blocks_that_others_hold_are_forgotten_but_not_zeroed() -> None:
    engine, executor = make_engine(block_size=4)
    prompt = numbers(8)
    bad, good = make_request("bad", (*prompt, 1), 4), make_request("good", (*prompt, 2), 4)
    engine.add(good)
    engine.add(bad)
    executor.spoil = _spoil(bad.prompt_token_ids, 0)
    transcript = run(engine)
    assert transcript.cached("good") == 0
    assert transcript.last["bad", 0].error_code == "numerical_error"
    assert transcript.tokens["good", 0] == reference(good)
    # good computed blocks 0 and 1, which bad found; 2 and 3 are good's and bad's own.
    assert [plan.zero_blocks for plan in executor.plans] == [(), (), (3,), ()]
    assert len(replay(engine.take_events())) == 1  # good's third block, sealed later


def test_an_error_in_one_choice_ends_all_choices_of_the_request() -> None:
    engine, executor = make_engine()
    engine.add(make_request("a", numbers(5), 8, num_choices=3, temperature=1.0))

    def error(piece: SequenceSlice) -> str | None:
        task = piece.sample
        return "bad" if task is not None and task.choice == 1 and len(task.output_token_ids) == 2 else None

    executor.spoil = error
    transcript = run(engine)
    assert [transcript.reason("a", choice) for choice in range(3)] == [FinishReason.ERROR] * 3
    assert engine.stats().finished_error_total == 1


def test_an_exception_caused_by_one_request_ends_only_that_one() -> None:
    engine, executor = make_engine(block_size=4)
    requests = [make_request(str(index), numbers(6, index), 5) for index in range(3)]
    poison = requests[1].prompt_token_ids

    def raise_for_poison(plan: StepPlan) -> None:
        for piece in plan.slices:
            if piece.sample is not None and piece.sample.prompt_token_ids == poison and piece.start > 6:
                raise ZeroDivisionError("poison")

    executor.before_step = raise_for_poison
    for request in requests:
        engine.add(request)
    transcript = run(engine)
    end = transcript.last["1", 0]
    assert (end.error_code, end.error) == (
        "internal_error",
        "The engine failed on this request (ZeroDivisionError) and ended it.",
    )
    assert transcript.tokens["0", 0] == reference(requests[0])
    assert transcript.tokens["2", 0] == reference(requests[2])


def test_blocks_are_zeroed_later_when_the_step_that_was_to_do_it_raises() -> None:
    engine, executor = make_engine(block_size=4)
    bad = make_request("bad", numbers(9, 1), 2)
    executor.spoil = _spoil(bad.prompt_token_ids, 0)
    engine.add(bad)
    run(engine)

    def fail(plan: StepPlan) -> None:
        raise ZeroDivisionError("poison")

    executor.before_step = fail
    engine.add(make_request("poison", numbers(3, 2), 2))
    run(engine)
    executor.before_step = lambda plan: None
    engine.add(make_request("good", numbers(3, 3), 2))
    run(engine)
    assert {0, 1, 2} <= set(executor.plans[1].zero_blocks)
    assert [plan.zero_blocks for plan in executor.plans[2:]] == [()]


def test_an_executor_that_fails_for_everybody_is_a_dead_group() -> None:
    engine, executor = make_engine()

    def fail(plan: StepPlan) -> None:
        raise RuntimeError("no device")

    executor.before_step = fail
    engine.add(make_request("a", numbers(5, 1)))
    engine.add(make_request("b", numbers(5, 2)))
    with pytest.raises(GroupFailed, match="each of 2 sequences fails, the first with RuntimeError"):
        engine.step()
    assert engine.unfinished() == [("a", 0), ("b", 0)]
    engine.fail_all()
    engine.check_integrity()
    assert not engine.has_work()
    assert engine.stats().finished_error_total == 2
