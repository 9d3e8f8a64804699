"""What each step holds: order, budget, chunks, admission, deferral, preemption. Exact outcomes."""

from __future__ import annotations

import pytest

from tests.unit.engine.toy import ToyExecutor, Transcript, make_engine, make_request, numbers, reference, run
from workers.types import RequestRefused


def _shapes(executor: ToyExecutor) -> list[list[tuple[int, int]]]:
    """(start, tokens) of each slice, step by step."""
    return [[(piece.start, len(piece.token_ids)) for piece in plan.slices] for plan in executor.plans]


def test_decode_rows_come_first_and_prompts_share_what_is_left() -> None:
    engine, executor = make_engine(block_size=4, max_step_tokens=10)
    engine.add(make_request("a", numbers(6, 1), 5))
    engine.step()
    engine.add(make_request("b", numbers(12, 2), 3))
    engine.add(make_request("c", numbers(5, 3), 2))
    run(engine)
    assert _shapes(executor) == [
        [(0, 6)],
        [(6, 1), (0, 9)],  # a decodes; b begins with the rest of the budget
        [(7, 1), (9, 3), (0, 5)],  # b ends its prompt, c fits beside it
        [(8, 1), (12, 1), (5, 1)],
        [(9, 1), (13, 1)],
    ]
    assert [plan.number for plan in executor.plans] == [1, 2, 3, 4, 5]


def test_a_long_prompt_leaves_room_for_others_when_its_chunk_is_capped() -> None:
    engine, executor = make_engine(block_size=4, max_step_tokens=10, max_prefill_chunk=4)
    engine.add(make_request("a", numbers(10, 1), 1))
    engine.add(make_request("b", numbers(4, 2), 1))
    run(engine)
    assert _shapes(executor) == [[(0, 4), (0, 4)], [(4, 4)], [(8, 2)]]


def test_lower_priority_value_goes_first_then_arrival() -> None:
    engine, _ = make_engine(block_size=4, max_running=1)
    for name, priority in (("a", 1), ("b", 0), ("c", 1), ("d", -1)):
        engine.add(make_request(name, numbers(3), 1, priority=priority))
    order = [chunk.request_id for _ in range(4) for chunk in engine.step()]
    assert order == ["d", "b", "a", "c"]


def test_many_running_still_leave_a_token_for_each() -> None:
    engine, executor = make_engine(block_size=4, max_step_tokens=3, max_running=128)
    for index in range(5):
        engine.add(make_request(str(index), numbers(2, index), 4))
    transcript = run(engine)
    assert max(len(shapes) for shapes in _shapes(executor)) == 3
    assert all(len(transcript.tokens[str(index), 0]) == 4 for index in range(5))


def test_admission_counts_the_expected_output_of_all() -> None:
    # 10 blocks of 4. Each request is expected to take (8 + 8) / 4 = 4 blocks at its end.
    engine, _ = make_engine(num_blocks=10, block_size=4, expected_output_tokens=8)
    for index in range(3):
        engine.add(make_request(str(index), numbers(8, index), 20))
    engine.step()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.active_blocks) == (2, 1, 4)
    assert stats.waiting_tokens == 8
    assert stats.running_tokens == 16


def test_known_output_length_is_not_estimated() -> None:
    engine, _ = make_engine(num_blocks=10, block_size=4, expected_output_tokens=8)
    for index in range(2):  # 8 + 17 - 1 tokens: 6 blocks each
        engine.add(make_request(str(index), numbers(8, index), 17, ignore_eos=True))
    engine.step()
    assert engine.stats().num_running == 1


def test_one_that_does_not_fit_is_not_overtaken() -> None:
    engine, executor = make_engine(num_blocks=10, block_size=4, expected_output_tokens=4)
    engine.add(make_request("a", numbers(20, 1), 9, ignore_eos=True))  # 7 blocks
    engine.step()
    engine.add(make_request("b", numbers(16, 2), 5))  # 5 blocks: waits
    engine.add(make_request("c", numbers(2, 3), 1))  # 1 block would be there
    engine.step()
    assert (engine.stats().num_running, engine.stats().num_waiting) == (1, 2)
    run(engine)
    prompts = [len(piece.token_ids) for plan in executor.plans for piece in plan.slices if piece.start == 0]
    assert prompts == [20, 16, 2]


def test_with_nothing_running_the_first_is_admitted_whatever_is_expected() -> None:
    engine, _ = make_engine(num_blocks=3, block_size=4, expected_output_tokens=1000)
    request = make_request("a", numbers(4), 9)  # all 3 blocks exactly
    engine.add(request)
    assert run(engine).tokens["a", 0] == reference(request)


def test_a_need_larger_than_the_pool_is_refused_with_both_numbers() -> None:
    engine, _ = make_engine(num_blocks=3, block_size=4)
    with pytest.raises(RequestRefused) as caught:
        engine.add(make_request("a", numbers(4), 10))
    assert caught.value.code == "kv_pool_too_small"
    assert caught.value.message == (
        "A prompt of 4 tokens with max_tokens 10 needs 4 KV blocks; the whole pool has 3 (12 tokens). Lower "
        "max_tokens, shorten the prompt, or give the group more KV memory."
    )
    assert not engine.has_work()


def test_the_waiting_queue_is_bounded_by_requests() -> None:
    engine, _ = make_engine(max_waiting=2, max_running=1, block_size=4)
    engine.add(make_request("a", numbers(3, 1), 4))
    engine.step()  # a runs
    engine.add(make_request("b", numbers(3, 2), 1, num_choices=3))
    engine.add(make_request("c", numbers(3, 3), 1))
    with pytest.raises(RequestRefused) as caught:
        engine.add(make_request("d", numbers(3, 4), 1))
    assert caught.value.code == "queue_full"
    engine.abort(make_request("b", (1,)).request_id)
    engine.add(make_request("d", numbers(3, 4), 1))
    assert set(run(engine).last) == {("a", 0), ("c", 0), ("d", 0)}


@pytest.mark.parametrize("name", ["max_waiting", "max_running", "max_step_tokens", "max_prefill_chunk"])
def test_limits_with_which_nothing_could_run_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 0: it must be at least 1"):
        make_engine(**{name: 0})  # type: ignore[arg-type]  # by name


# -- deferral -----------------------------------------------------------------------------------------------


def test_a_prefix_being_computed_is_waited_for_and_shared() -> None:
    engine, executor = make_engine(block_size=4, max_step_tokens=20)
    prompt = numbers(12)
    engine.add(make_request("a", (*prompt, 1), 3))
    engine.add(make_request("b", (*prompt, 2), 3))
    engine.add(make_request("c", numbers(6, 5), 2))  # not of the family: goes along at once
    transcript = run(engine)
    assert _shapes(executor)[:2] == [[(0, 13), (0, 6)], [(13, 1), (6, 1), (12, 1)]]
    assert [transcript.cached(name) for name in "abc"] == [0, 12, 0]
    tables = [piece.block_table for piece in executor.plans[1].slices]
    assert tables[0][:3] == tables[2][:3] == (0, 1, 2)


def test_deferral_spans_all_chunks_of_the_shared_part() -> None:
    engine, executor = make_engine(block_size=4, max_step_tokens=20, max_prefill_chunk=8)
    prompt = numbers(16)
    engine.add(make_request("a", (*prompt, *numbers(8, 3)), 1))
    engine.add(make_request("b", (*prompt, 9), 1))
    run(engine)
    # b begins when the 16 shared tokens are there, beside the last chunk of a, which it does not need.
    assert _shapes(executor) == [[(0, 8)], [(8, 8)], [(16, 8), (16, 1)]]


def test_the_deferred_go_on_when_the_one_they_wait_for_is_aborted() -> None:
    engine, executor = make_engine(block_size=4, max_step_tokens=8)
    prompt = numbers(24)
    a, b = make_request("a", (*prompt, 1), 2), make_request("b", (*prompt, 2), 2)
    engine.add(a)
    engine.add(b)
    engine.step()
    assert engine.stats().num_waiting == 1
    assert engine.abort(a.request_id)
    engine.check_integrity()
    transcript = run(engine)
    assert transcript.tokens == {("b", 0): reference(b)}
    assert transcript.cached("b") == 8  # what a had finished
    assert executor.num_computed_tokens == 8 + 17 + 1


def test_an_urgent_request_does_not_wait_for_a_less_urgent_one() -> None:
    engine, executor = make_engine(block_size=4, max_step_tokens=16, max_prefill_chunk=8)
    prompt = numbers(12)
    engine.add(make_request("slow", (*prompt, 1), 1, priority=1))
    engine.step()
    engine.add(make_request("fast", (*prompt, 2), 1, priority=0))
    engine.step()
    assert _shapes(executor)[1] == [(8, 5), (8, 5)]


# -- preemption ---------------------------------------------------------------------------------------------


def test_the_victim_is_the_one_that_loses_least_and_its_tokens_stay_the_same() -> None:
    engine, executor = make_engine(num_blocks=9, block_size=4, expected_output_tokens=1)
    requests = [
        make_request("old", numbers(7, 1), 14),
        make_request("long", numbers(11, 2), 12),
        make_request("short", numbers(3, 3), 12),
    ]
    for request in requests:
        engine.add(request)
    transcript = run(engine)
    assert engine.stats().preemptions_total > 0
    assert {key[0]: tokens for key, tokens in transcript.tokens.items()} == {
        request.request_id: reference(request) for request in requests
    }
    # In the step where the pool first ran out, `short` had the fewest tokens to lose.
    counts = [len(plan.slices) for plan in executor.plans]
    first_loss = next(i for i in range(1, len(counts)) if counts[i] < counts[i - 1])
    left = {piece.sample.prompt_token_ids for piece in executor.plans[first_loss].slices if piece.sample}
    assert left == {requests[0].prompt_token_ids, requests[1].prompt_token_ids}


def test_a_less_urgent_one_is_preempted_before_a_cheaper_one() -> None:
    engine, executor = make_engine(num_blocks=9, block_size=4, expected_output_tokens=1)
    old = make_request("old", numbers(7, 1), 14)
    cheap = make_request("cheap", numbers(3, 3), 12)
    costly = make_request("costly", numbers(11, 2), 12, priority=5)
    for request in (old, cheap, costly):
        engine.add(request)
    run(engine)
    counts = [len(plan.slices) for plan in executor.plans]
    first_loss = next(i for i in range(1, len(counts)) if counts[i] < counts[i - 1])
    left = {piece.sample.prompt_token_ids for piece in executor.plans[first_loss].slices if piece.sample}
    assert left == {old.prompt_token_ids, cheap.prompt_token_ids}


def test_a_preempted_sequence_finds_its_own_blocks_again() -> None:
    engine, executor = make_engine(num_blocks=6, block_size=4, expected_output_tokens=1)
    a, b = make_request("a", numbers(7, 1), 10), make_request("b", numbers(7, 2), 10)
    engine.add(a)
    engine.add(b)
    transcript = run(engine)
    assert engine.stats().preemptions_total == 1
    assert transcript.tokens["a", 0] == reference(a)
    assert transcript.tokens["b", 0] == reference(b)
    resumed = next(piece for plan in executor.plans[1:] for piece in plan.slices if len(piece.token_ids) > 1)
    assert resumed.start == 8  # two of its three blocks had survived in the cache; its last went to a
    assert transcript.cached("b") == 0  # what the client is told stays what the first admission found
    assert engine.stats().cached_tokens_total == 0


def test_the_oldest_gets_on_in_the_smallest_pool() -> None:
    engine, _ = make_engine(num_blocks=4, block_size=1, expected_output_tokens=1, max_step_tokens=4)
    requests = [make_request(str(index), (index + 1,), 4) for index in range(6)]
    for request in requests:
        engine.add(request)
    transcript = run(engine)
    assert [key[0] for key in transcript.last] == [request.request_id for request in requests]
    for request in requests:
        assert transcript.tokens[request.request_id, 0] == reference(request)


def test_nobody_is_admitted_in_a_step_that_preempts() -> None:
    engine, executor = make_engine(num_blocks=6, block_size=4, expected_output_tokens=1)
    engine.add(make_request("old", numbers(7, 1), 14))
    engine.add(make_request("young", numbers(8, 2), 12))
    for _ in range(5):
        engine.step()
    assert (engine.stats().active_blocks, engine.stats().preemptions_total) == (6, 0)
    engine.add(make_request("urgent", numbers(2, 3), 1, priority=-1))
    engine.step()  # young needs a fourth block and gives up its three: urgent has to wait all the same
    assert (engine.stats().preemptions_total, engine.stats().num_waiting) == (1, 2)
    assert [piece.start for piece in executor.plans[-1].slices] == [11]
    engine.step()
    assert [piece.start for piece in executor.plans[-1].slices] == [12, 0]


def test_a_chunk_reserved_before_its_sequence_was_preempted_is_dropped() -> None:
    """`deferred` starts late behind the prefix it shares, so that it loses less than the younger `other`,
    which takes its block in the very step that had a chunk for it."""
    engine, _ = make_engine(num_blocks=23, block_size=1, max_prefill_chunk=1, expected_output_tokens=1)
    transcript = Transcript()
    requests = [
        make_request("first", numbers(4, 0), 10),
        make_request("deferred", numbers(10, 0), 7),
        make_request("small", numbers(2, 1), 2),
        make_request("other", numbers(8, 1), 4),
    ]
    for request, num_steps in zip(requests, (0, 2, 0, 2), strict=True):
        engine.add(request)
        for _ in range(num_steps):
            transcript.take(engine.step())
    run(engine, transcript)
    assert engine.stats().preemptions_total > 0
    for request in requests:
        assert transcript.tokens[request.request_id, 0] == reference(request)


def test_choices_share_the_full_blocks_of_their_prompt() -> None:
    """The last, partial one is computed again by each choice: nothing is copied, nothing forked."""
    engine, executor = make_engine(block_size=4, num_blocks=64)
    engine.add(
        make_request("a", numbers(10), 3, num_choices=5, temperature=1.0)
    )  # 2 full blocks and 2 tokens
    engine.step()  # the first choice computes the prompt
    assert executor.num_computed_tokens == 10 and engine.stats().active_blocks == 3
    engine.step()  # the others what is left of it, and their first token
    assert executor.num_computed_tokens == 10 + 1 + 4 * 2
    assert engine.stats().active_blocks == 2 + 5  # shared, and one each
    run(engine)
