"""Steps planned while the one before them is computed: which are, and that nothing but the time changes."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence

import pytest

from tests.unit.engine.toy import (
    ToyExecutor,
    Transcript,
    make_engine,
    make_request,
    numbers,
    reference,
    replay,
    run,
)
from workers.config import SpeculativeConfig
from workers.engine.engine import Engine
from workers.engine.step import GroupFailed, SequenceSlice, StepPlan
from workers.hashing import block_hashes
from workers.types import FinishReason, GenerateRequest


def ahead(executor: ToyExecutor) -> list[bool]:
    """Of each plan whether it had tokens that were not known yet."""
    tasks = [[piece.sample for piece in plan.slices if piece.sample] for plan in executor.plans]
    return [any(task.num_sampled is not None for task in own) for own in tasks]


def spans(executor: ToyExecutor) -> list[list[tuple[int, int]]]:
    return [[(piece.start, len(piece.token_ids)) for piece in plan.slices] for plan in executor.plans]


def test_a_step_begins_before_the_results_of_the_one_before_it() -> None:
    engine, executor = make_engine(plans_ahead=True, max_step_tokens=6)
    engine.add(make_request("a", numbers(4, 1), 3))
    engine.add(make_request("b", numbers(5, 2), 2))
    transcript = run(engine)
    # b's prompt takes what a's leaves, then the rest; each samples its last token in the last row it has.
    assert spans(executor) == [[(0, 4), (0, 2)], [(4, 1), (2, 3)], [(5, 1), (5, 1)]]
    assert ahead(executor) == [False, True, True]
    for name, seed, length, count in (("a", 1, 4, 3), ("b", 2, 5, 2)):
        assert transcript.tokens[name, 0] == reference(make_request(name, numbers(length, seed), count))
        assert transcript.reason(name) is FinishReason.LENGTH


def test_the_row_after_an_end_id_is_thrown_away() -> None:
    request = make_request("a", numbers(7, 1), 20)
    tokens = reference(request)
    end = next(place for place, token in enumerate(tokens) if token not in tokens[:place] and place > 3)
    engine, executor = make_engine(plans_ahead=True, block_size=4, eos=(tokens[end],))
    engine.add(request)
    transcript = Transcript()
    while not transcript.last:
        transcript.take(engine.step())
        engine.check_integrity()
    assert engine.has_work() and engine.can_step()  # a step of its row alone is in flight
    assert engine.stats().active_blocks == -(-(7 + end + 1) // 4)  # written there
    assert engine.step() == [] and not engine.has_work() and not engine.can_step()
    engine.check_integrity()
    assert transcript.tokens["a", 0] == tokens[: end + 1]
    assert transcript.last["a", 0].stop_token_id == tokens[end]
    assert spans(executor)[-1] == [(7 + end, 1)]
    stats = engine.stats()
    assert (stats.active_blocks, stats.generated_tokens_total) == (0, end + 1)
    history = (*request.prompt_token_ids, *tokens[:end])  # the last token was never computed
    assert replay(engine.take_events()) == set(block_hashes(history, 4))


def test_an_end_by_length_is_foreseen() -> None:
    engine, executor = make_engine(plans_ahead=True)
    for count in (0, 1, 2):
        engine.add(make_request(str(count), numbers(5, count), count))
        transcript = run(engine)
        assert transcript.tokens[str(count), 0] == reference(make_request("x", numbers(5, count), count))
    assert spans(executor) == [[(0, 5)], [(0, 5)], [(0, 5)], [(5, 1)]]


@pytest.mark.parametrize(
    "changes",
    [{"num_logprobs": 0}, {"num_prompt_logprobs": 0}, {"min_tokens": 1, "stop_token_ids": (5,)}],
    ids=str,
)
def test_a_request_that_needs_the_host_has_all_steps_wait_for_it(changes: dict[str, object]) -> None:
    engine, executor = make_engine(plans_ahead=True)
    plain = make_request("plain", numbers(5, 1), 12)
    bound = make_request("bound", numbers(6, 2), 4, **changes)  # type: ignore[arg-type]
    engine.add(plain)
    transcript = Transcript()
    for _ in range(3):
        transcript.take(engine.step())
    engine.add(bound)
    run(engine, transcript)
    assert transcript.tokens["plain", 0] == reference(plain)
    assert transcript.tokens["bound", 0] == reference(bound)
    # One had begun when it came; the one in which it ends is the last that waits.
    first, last = 4, 4 + len(reference(bound)) - 1
    assert ahead(executor) == [0 < n < first or n > last + 1 for n in range(len(executor.plans))]


def test_a_wrong_count_of_those_that_need_the_host_is_found() -> None:
    engine, _ = make_engine(plans_ahead=True)
    engine.add(make_request("a", numbers(5, 1), 2, num_logprobs=0))
    engine.step()
    engine.check_integrity()
    engine._scheduler.flights._num_needing_host -= 1
    with pytest.raises(AssertionError, match="0 need the host, 1 found"):
        engine.check_integrity()


def test_engines_that_guess_wait() -> None:
    engine, executor = make_engine(plans_ahead=True, speculative=SpeculativeConfig(method="prompt_lookup"))
    engine.add(make_request("a", numbers(9, 1), 12, top_k=2))
    run(engine)
    assert not any(ahead(executor))


def family() -> list[GenerateRequest]:
    system = numbers(37, 9)
    return [
        make_request("p8", numbers(10, 5), 70),
        make_request("p9", numbers(12, 6), 70),
        make_request("p0", numbers(1, 1), 9),
        make_request("p1", numbers(16, 2), 20),
        make_request("p2", (*system, *numbers(5, 3)), 12),
        make_request("p3", (*system, *numbers(11, 4)), 12, temperature=1.0, num_choices=3),
        make_request("p4", system, 17, stop_token_ids=(5, 6, 7, 8, 9)),
        make_request("p5", numbers(64, 5), 16),
        make_request("p6", system, 17, ignore_eos=True),
        make_request("p7", numbers(33, 6), 0),
        make_request("pa", numbers(33, 6), 1),
    ]


def check(transcript: Transcript, requests: Sequence[GenerateRequest], eos: tuple[int, ...]) -> None:
    for request in requests:
        for choice in range(request.num_choices):
            assert transcript.tokens[request.request_id, choice] == reference(request, choice, eos)


@pytest.mark.parametrize("prefix_reuse", [True, False])
@pytest.mark.parametrize("chunk", [1, 7, 16, None])
def test_the_tokens_are_the_same(chunk: int | None, prefix_reuse: bool) -> None:
    engine, executor = make_engine(
        plans_ahead=True,
        num_blocks=200,
        max_prefill_chunk=chunk,
        max_step_tokens=64,
        prefix_reuse=prefix_reuse,
        eos=(1, 2),
    )
    for request in family():
        engine.add(request)
    check(run(engine), family(), (1, 2))
    assert sum(ahead(executor)) > len(executor.plans) / 2


@pytest.mark.parametrize("chunk", [1, 16, None])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_with_preemption(chunk: int | None, block_size: int) -> None:
    engine, executor = make_engine(
        plans_ahead=True,
        num_blocks=-(-85 // block_size) + 2,
        block_size=block_size,
        max_prefill_chunk=chunk,
        expected_output_tokens=1,
        eos=(1, 2),
    )
    for request in family():
        engine.add(request)
    check(run(engine), family(), (1, 2))
    assert engine.stats().preemptions_total > 0 and any(ahead(executor))


def test_arrivals_and_aborts_at_random_times() -> None:
    num_ahead = 0
    for seed in range(60):
        draw = random.Random(seed)
        block_size, num_blocks = draw.choice([1, 2, 4]), draw.randint(6, 32)
        engine, executor = make_engine(
            plans_ahead=True,
            num_blocks=num_blocks,
            block_size=block_size,
            max_step_tokens=draw.choice([2, 7, 64]),
            max_running=draw.choice([2, 128]),
            expected_output_tokens=1,
            eos=(3, 4, 5, 6),
        )
        requests, gone, transcript = [], set(), Transcript()
        for index in range(draw.randint(3, 9)):
            most = num_blocks * block_size
            length = draw.randint(1, max(1, most * 2 // 3))
            request = make_request(
                str(index),
                numbers(length, draw.randint(0, 1)),
                draw.randint(1, most - length + 1),
                num_choices=draw.choice([1, 1, 3]),
                temperature=draw.choice([0.0, 1.0]),
                num_logprobs=draw.choice([None] * 7 + [0]),
            )
            engine.add(request)
            requests.append(request)
            for _ in range(draw.randint(0, 5)):
                transcript.take(engine.step())
                engine.check_integrity()
            if draw.random() < 0.4:
                name = draw.choice(requests).request_id
                if engine.abort(name):
                    gone.add(name)
                engine.check_integrity()
        run(engine, transcript)
        assert engine.stats().active_blocks == 0
        check(transcript, [each for each in requests if each.request_id not in gone], (3, 4, 5, 6))
        num_ahead += sum(ahead(executor))
    assert num_ahead > 300


def test_a_cancelled_request_holds_its_blocks_until_the_step_in_flight_has_ended() -> None:
    engine, _ = make_engine(plans_ahead=True, num_blocks=4, block_size=4)
    engine.add(make_request("a", numbers(14, 1), 3))
    other = make_request("b", numbers(13, 2), 2)
    engine.step()
    assert engine.abort("a")  # type: ignore[arg-type]
    assert engine.stats().active_blocks == 4 and engine.has_work()
    engine.check_integrity()
    engine.add(other)
    transcript = run(engine)
    assert transcript.tokens["b", 0] == reference(other)
    assert transcript.cached("b") == 0


def spoil(prompt: tuple[int, ...], at: int) -> object:
    def error(piece: SequenceSlice) -> str | None:
        task = piece.sample
        is_hit = task is not None and task.prompt_token_ids == prompt and task.num_new == at
        return "not a finite number" if is_hit else None

    return error


@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_numerical_error_with_a_step_in_flight(at: int) -> None:
    engine, executor = make_engine(plans_ahead=True, block_size=4)
    bad, good = make_request("bad", numbers(14, 1), 8), make_request("good", numbers(10, 2), 8)
    executor.spoil = spoil(bad.prompt_token_ids, at)  # type: ignore[assignment]
    engine.add(bad)
    engine.add(good)
    transcript = run(engine)
    assert transcript.last["bad", 0].error_code == "numerical_error"
    assert transcript.tokens["bad", 0] == reference(bad)[:at]
    assert transcript.tokens["good", 0] == reference(good)
    held = {
        block
        for plan in executor.plans
        for piece in plan.slices
        if piece.sample is not None and piece.sample.prompt_token_ids == bad.prompt_token_ids
        for block in piece.block_table
    }
    assert {block for plan in executor.plans for block in plan.zero_blocks} == held
    assert transcript.cached("good") == 0
    executor.spoil = lambda piece: None
    engine.add(make_request("again", bad.prompt_token_ids, 8))
    again = run(engine)
    assert (again.cached("again"), again.tokens["again", 0]) == (0, reference(bad))


def failing(executor: ToyExecutor, which: set[int]) -> None:
    """Raises at the plans of these numbers, once each, in whole."""
    left = set(which)

    def fail(plan: StepPlan) -> None:
        if plan.number in left:
            left.remove(plan.number)
            raise OverflowError(f"step {plan.number}")

    executor.is_exact = False  # after a fault, blocks for more tokens may be there
    executor.before_step = fail


@pytest.mark.parametrize("which", [{1}, {2}, {3}, {2, 3}, {1, 2, 3, 4, 5, 6}], ids=str)
def test_a_step_that_raises_is_computed_again(which: set[int]) -> None:
    engine, executor = make_engine(plans_ahead=True, block_size=4, eos=(1, 2))
    failing(executor, which)
    requests = [make_request(str(n), numbers(9 + n, n), 6 + n, temperature=1.0) for n in range(3)]
    for request in requests:
        engine.add(request)
    transcript = run(engine)
    check(transcript, requests, (1, 2))


@pytest.mark.parametrize("most", [4, 6, 1_000])
def test_what_fails_ahead_three_times_in_a_row_is_done_no_more(
    most: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Only steps with ids that are known on the device fail here, each time the two that are in flight."""
    engine, executor = make_engine(plans_ahead=True, block_size=4)
    executor.is_exact = False
    failed: list[int] = []

    def fail(plan: StepPlan) -> None:
        tasks = [piece.sample for piece in plan.slices if piece.sample]
        if any(task.num_sampled is not None for task in tasks) and len(failed) < most:
            failed.append(plan.number)
            raise OverflowError("no memory")

    executor.before_step = fail
    requests = [make_request(str(n), numbers(9 + n, n), 12) for n in range(2)]
    for request in requests:
        engine.add(request)
    with caplog.at_level(logging.WARNING):
        check(run(engine), requests, ())
    assert failed == [2, 3, 5, 6, 8, 9][:most]
    assert any(ahead(executor)) is (most == 4)
    assert [record.exc_info is not None for record in caplog.records[:2]] == [True, False]
    assert [record.message for record in caplog.records[2:]] == [
        "step 8, planned ahead, is planned again: OverflowError('no memory')",
        "no step is planned ahead any more until this group is started anew: 3 failures in a row, the last "
        "one OverflowError('no memory')",
    ][: most - 4]


def test_a_poisoned_request_ends_alone() -> None:
    engine, executor = make_engine(plans_ahead=True, block_size=4)
    requests = [make_request(str(n), numbers(6, n), 9) for n in range(3)]
    executor.is_exact = False

    def fail(plan: StepPlan) -> None:
        for piece in plan.slices:
            task = piece.sample
            if task is not None and task.prompt_token_ids == requests[1].prompt_token_ids and piece.start > 8:
                raise ZeroDivisionError("poison")

    executor.before_step = fail
    for request in requests:
        engine.add(request)
    transcript = run(engine)
    assert transcript.last["1", 0].error_code == "internal_error"
    for name in (0, 2):
        assert transcript.tokens[str(name), 0] == reference(requests[name])


def test_a_group_that_dies_with_two_steps_in_flight() -> None:
    engine, executor = make_engine(plans_ahead=True)
    engine.add(make_request("a", numbers(5, 1), 9))
    for _ in range(2):
        engine.step()

    def die(plan: StepPlan) -> None:
        raise GroupFailed("rank 1 is gone")

    executor.before_step = die
    with pytest.raises(GroupFailed, match="rank 1 is gone"):
        engine.step()
    assert engine.unfinished() == [("a", 0)]
    engine.fail_all()
    idle(engine)


def test_fail_all_waits_for_the_step_in_flight() -> None:
    engine, executor = make_engine(plans_ahead=True)
    engine.add(make_request("a", numbers(5, 1), 9))
    engine.step()
    num_before = len(executor.plans)
    engine.fail_all()
    assert len(executor.plans) == num_before + 1
    idle(engine)


def idle(engine: Engine) -> None:
    assert not engine.has_work() and engine.stats().active_blocks == 0
    engine.check_integrity()
