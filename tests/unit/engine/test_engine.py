"""Ends, scores, choices and counts of the engine. Exact outcomes."""

from __future__ import annotations

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
from tests.unit.engine.toy_reference import reference_scores
from workers.engine.step import SampleTask, StepPlan
from workers.hashing import block_hashes
from workers.types import FinishReason, RequestId, RequestRefused


def _tasks(executor: ToyExecutor) -> list[SampleTask]:
    return [piece.sample for plan in executor.plans for piece in plan.slices if piece.sample is not None]


# -- ends ---------------------------------------------------------------------------------------------------


def test_ends_at_any_of_several_end_ids_and_names_it() -> None:
    free = reference(make_request("a", numbers(9), 12))
    end = free[4]
    first = free.index(end)
    engine, _ = make_engine(eos=(free[6], end))
    engine.add(make_request("a", numbers(9), 12))
    transcript = run(engine)
    stop = min(first, free.index(free[6]))
    assert transcript.tokens["a", 0] == free[: stop + 1]  # the end id is part of the tokens
    assert transcript.reason("a") is FinishReason.STOP
    assert transcript.last["a", 0].stop_token_id == free[stop]


def test_stop_ids_work_beside_end_ids_and_survive_ignore_eos() -> None:
    free = reference(make_request("a", numbers(9), 12))
    engine, executor = make_engine(eos=(free[1],))
    engine.add(make_request("a", numbers(9), 12, ignore_eos=True, stop_token_ids=(free[3],)))
    transcript = run(engine)
    assert transcript.tokens["a", 0] == free[: free.index(free[3]) + 1]
    assert transcript.last["a", 0].stop_token_id == free[3]
    assert {tuple(task.forbidden_token_ids) for task in _tasks(executor)} == {()}


def test_min_tokens_forbids_all_ends_until_reached() -> None:
    request = make_request("a", numbers(9), 12, min_tokens=5, stop_token_ids=(11, 7))
    engine, executor = make_engine(eos=(2, 500))  # 500 is not in the vocabulary: it can never come
    engine.add(request)
    transcript = run(engine)
    assert transcript.tokens["a", 0] == reference(request, eos=(2,))
    forbidden = [tuple(task.forbidden_token_ids) for task in _tasks(executor)]
    assert forbidden[:5] == [(2, 7, 11)] * 5
    assert set(forbidden[5:]) == {()}


def test_min_tokens_with_ignore_eos_forbids_only_stop_ids() -> None:
    engine, executor = make_engine(eos=(2,))
    engine.add(make_request("a", numbers(9), 4, min_tokens=4, ignore_eos=True, stop_token_ids=(7,)))
    run(engine)
    assert {tuple(task.forbidden_token_ids) for task in _tasks(executor)} == {(7,)}


def test_max_tokens_and_an_end_in_the_last_token_say_which_came() -> None:
    free = reference(make_request("a", numbers(9), 6))
    engine, _ = make_engine()
    engine.add(make_request("length", numbers(9), 6))
    end = next(index for index in range(6) if free.index(free[index]) == index and index > 0)
    engine.add(make_request("stop", numbers(9), end + 1, stop_token_ids=(free[end],)))
    transcript = run(engine)
    assert (transcript.reason("length"), transcript.last["length", 0].stop_token_id) == (
        FinishReason.LENGTH,
        None,
    )
    assert (transcript.reason("stop"), transcript.last["stop", 0].stop_token_id) == (
        FinishReason.STOP,
        free[end],
    )


@pytest.mark.parametrize("max_tokens", [1, 4])
def test_fills_the_context_to_its_last_token(max_tokens: int) -> None:
    engine, executor = make_engine(max_model_len=32, num_blocks=2)
    request = make_request("a", numbers(32 - max_tokens), max_tokens)
    engine.add(request)
    transcript = run(engine)
    assert transcript.tokens["a", 0] == reference(request)
    assert len(transcript.tokens["a", 0]) == max_tokens
    assert transcript.reason("a") is FinishReason.LENGTH
    assert executor.num_computed_tokens == 31  # the last token is never computed
    with pytest.raises(RequestRefused, match="together 33"):
        engine.add(make_request("b", numbers(32), 1))


# -- prompt scores ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 7, 16, 512])
def test_max_tokens_0_scores_the_prompt_in_one_final_chunk(chunk: int) -> None:
    engine, executor = make_engine(max_step_tokens=chunk)
    request = make_request("a", numbers(50), 0, num_prompt_logprobs=3)
    engine.add(request)
    transcript = run(engine)
    chunk_of_a = transcript.last["a", 0]
    assert chunk_of_a is transcript.first["a", 0]
    assert (chunk_of_a.token_ids, chunk_of_a.finish_reason) == ((), FinishReason.LENGTH)
    assert chunk_of_a.prompt_logprobs == reference_scores(request)
    assert not _tasks(executor)
    assert executor.num_computed_tokens == 50


def test_prompt_scores_come_once_with_the_first_token() -> None:
    engine, _ = make_engine(max_step_tokens=7)
    request = make_request("a", numbers(20), 3, num_prompt_logprobs=0, num_logprobs=1, num_choices=2)
    engine.add(request)
    chunks = []
    while engine.has_work():
        chunks += engine.step()
    of_first = [chunk for chunk in chunks if chunk.choice == 0]
    assert of_first[0].prompt_logprobs == reference_scores(request)
    assert [chunk.prompt_logprobs for chunk in of_first[1:]] == [None, None]
    assert all(chunk.prompt_logprobs is None for chunk in chunks if chunk.choice == 1)
    for chunk in chunks:
        assert chunk.logprobs is not None
        assert [entry.token_id for entry in chunk.logprobs] == list(chunk.token_ids)


def test_a_prompt_of_one_token_has_one_empty_score() -> None:
    engine, _ = make_engine()
    engine.add(make_request("a", (5,), 0, num_prompt_logprobs=1))
    assert run(engine).first["a", 0].prompt_logprobs == (None,)


def test_scoring_does_not_read_the_cache_and_other_choices_do() -> None:
    engine, _ = make_engine()
    engine.add(make_request("warm", numbers(40), 1))
    run(engine)
    engine.add(make_request("a", numbers(40), 2, num_prompt_logprobs=0, num_choices=2))
    transcript = run(engine)
    assert (transcript.cached("a", 0), transcript.cached("a", 1)) == (0, 32)


def test_scores_are_not_computed_twice_after_a_preemption() -> None:
    engine, executor = make_engine(
        num_blocks=12, block_size=4, max_step_tokens=8, expected_output_tokens=1, max_prefill_chunk=2
    )
    old = make_request("old", numbers(7, 1), 22)
    scored = make_request("scored", numbers(30, 2), 2, num_prompt_logprobs=2)
    engine.add(old)
    engine.add(scored)
    transcript = run(engine)
    assert transcript.tokens["old", 0] == reference(old)
    assert transcript.tokens["scored", 0] == reference(scored)
    assert transcript.first["scored", 0].prompt_logprobs == reference_scores(scored)
    rows = [
        piece.start + row
        for plan in executor.plans
        for piece in plan.slices
        for row in range(len(piece.prompt_targets or ()))
    ]
    assert engine.stats().preemptions_total > 0
    assert rows == list(range(29))  # each once, in order


# -- choices and the prefix cache ---------------------------------------------------------------------------


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 48, 64])
def test_prompts_around_block_multiples_cold_warm_and_grown(length: int) -> None:
    engine, _ = make_engine(num_blocks=200)
    request = make_request("cold", numbers(length), 20, num_logprobs=1)
    answer = reference(request)
    engine.add(request)
    cold = run(engine)
    for name in ("warm", "x1", "x2", "x3", "x4", "x5"):
        engine.add(make_request(name, numbers(length), 20, num_logprobs=1))
        if name == "warm":
            warm = run(engine)
    crowd = run(engine)
    grown = make_request("grown", (*numbers(length), *answer), 20)
    engine.add(grown)
    last = run(engine)
    readable = (length - 1) // 16 * 16
    assert cold.tokens["cold", 0] == warm.tokens["warm", 0] == answer
    assert [crowd.tokens[f"x{i}", 0] for i in range(1, 6)] == [answer] * 5
    assert (cold.cached("cold"), warm.cached("warm")) == (0, readable)
    assert [crowd.cached(f"x{i}") for i in range(1, 6)] == [readable] * 5
    assert last.tokens["grown", 0] == reference(grown)
    assert last.cached("grown") == (length + 19) // 16 * 16  # the last sampled token was never computed


def test_choices_share_the_blocks_of_the_prompt() -> None:
    engine, executor = make_engine(num_blocks=40)
    request = make_request("a", numbers(40), 6, num_choices=4, temperature=1.0)
    engine.add(request)
    transcript = Transcript()
    transcript.take(engine.step())
    transcript.take(engine.step())
    assert engine.stats().active_blocks == 2 + 4  # two full blocks in common, a tail for each
    run(engine, transcript)
    for choice in range(4):
        assert transcript.tokens["a", choice] == reference(request, choice)
    assert [transcript.cached("a", choice) for choice in range(4)] == [0, 32, 32, 32]
    assert executor.num_computed_tokens == 40 + 3 * 8 + 4 * 5
    stats = engine.stats()
    assert (stats.prompt_tokens_total, stats.cached_tokens_total, stats.generated_tokens_total) == (40, 0, 24)
    assert (stats.finished_length_total, stats.finished_stop_total) == (1, 0)  # one request


def test_without_prefix_reuse_each_choice_computes_all_and_nothing_is_published() -> None:
    engine, executor = make_engine(prefix_reuse=False)
    request = make_request("a", numbers(40), 2, num_choices=3)
    engine.add(request)
    transcript = run(engine)
    assert executor.num_computed_tokens == 3 * 41
    assert [transcript.cached("a", choice) for choice in range(3)] == [0, 0, 0]
    assert engine.take_events() == []
    assert engine.stats().cached_blocks == 0


def test_salts_separate_tenants() -> None:
    engine, _ = make_engine()
    for name, salt in (("a", "one"), ("b", "two"), ("c", "one")):
        engine.add(make_request(name, numbers(40), 1, cache_salt=salt))
        transcript = run(engine)
        assert transcript.cached(name) == (32 if name == "c" else 0)


def test_the_event_log_replays_to_what_the_pool_holds() -> None:
    engine, _ = make_engine(num_blocks=6, block_size=4)
    known: set[bytes] = set()
    for index in range(5):
        engine.add(make_request(str(index), numbers(13, index), 4))
        run(engine)
        replay(engine.take_events(), known)
        assert len(known) == engine.stats().cached_blocks
        last = make_request("x", numbers(13, index))
        history = (*last.prompt_token_ids, *reference(make_request("x", numbers(13, index), 4)))
        assert set(block_hashes(history[:-1], 4)) <= known


# -- aborts and counts --------------------------------------------------------------------------------------


def test_abort_frees_blocks_at_once_wherever_the_request_is() -> None:
    engine, _ = make_engine(max_step_tokens=24, max_running=3)
    engine.add(make_request("decoding", numbers(5, 1), 50))
    engine.step()
    engine.add(make_request("prefilling", numbers(60, 2), 5, num_choices=2))
    engine.add(make_request("waiting", numbers(60, 3), 5))
    engine.step()
    assert engine.stats().active_blocks == 1 + 2
    for name, left in (("waiting", 3), ("prefilling", 1), ("decoding", 0)):
        assert engine.abort(RequestId(name))
        engine.check_integrity()
        assert engine.stats().active_blocks == left
        assert not engine.abort(RequestId(name))
        assert engine.unfinished_choices(RequestId(name)) == ()
    assert not engine.has_work()
    assert engine.step() == []
    stats = engine.stats()
    assert (stats.cancelled_total, stats.waiting_tokens, stats.running_tokens) == (3, 0, 0)


def test_a_request_id_in_use_is_refused() -> None:
    engine, _ = make_engine()
    engine.add(make_request("a", numbers(5), 1))
    with pytest.raises(RequestRefused) as caught:
        engine.add(make_request("a", numbers(5), 1))
    assert caught.value.code == "duplicate_request_id"
    run(engine)
    engine.add(make_request("a", numbers(5), 1))  # free again


def test_stats_of_a_running_engine() -> None:
    now, lengths = [0.0], iter([2.0, 1.0])

    def take_a_while(_: StepPlan) -> None:
        now[0] += next(lengths)

    engine, executor = make_engine(max_step_tokens=16, clock=lambda: now[0])
    executor.before_step = take_a_while
    engine.add(make_request("a", numbers(20, 1), 5))
    engine.step()
    first = engine.stats()
    assert (first.num_running, first.num_waiting, first.waiting_tokens, first.running_tokens) == (1, 0, 4, 16)
    assert (first.num_steps, first.step_seconds) == (1, 2.0)
    engine.step()
    second = engine.stats()
    assert (second.waiting_tokens, second.running_tokens, second.generated_tokens_total) == (0, 20, 1)
    assert second.step_seconds == pytest.approx(1.9)
    assert (second.free_blocks, second.cached_blocks, second.active_blocks) == (62, 0, 2)
