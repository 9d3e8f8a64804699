"""Beam searches in the engine: their blocks, their place among other requests, their end."""

from __future__ import annotations

import pytest

from tests.unit.engine.toy import Transcript, make_engine, make_request, numbers, reference, run
from tests.unit.engine.toy_reference import reference_scores, reference_search
from workers.engine.engine import Engine
from workers.engine.step import StepPlan
from workers.types import BeamParams, EarlyStopping, FinishReason, GenerateRequest, RequestRefused

EOS = (3, 14, 15, 92, 65)
NEVER = EarlyStopping.NEVER


def beam(
    name: str,
    prompt_len: int,
    max_tokens: int,
    width: int,
    *,
    num_choices: int | None = None,
    **options: object,
) -> GenerateRequest:
    return make_request(
        name,
        numbers(prompt_len, seed=ord(name[0])),
        max_tokens,
        num_choices=width if num_choices is None else num_choices,
        beam=BeamParams(width=width, early_stopping=NEVER),
        **options,  # type: ignore[arg-type]
    )


def check(transcript: Transcript, request: GenerateRequest, eos: tuple[int, ...] = EOS) -> None:
    for choice, expected in enumerate(reference_search(request, eos)):
        key = (request.request_id, choice)
        last = transcript.last[key]
        first = transcript.first[key]
        assert first is last or (choice == 0 and not first.token_ids), "tokens come at the end of a search"
        assert (last.token_ids, last.score) == (expected.token_ids, expected.score)
        ended = expected.token_ids[-1] in eos
        assert last.finish_reason is (FinishReason.STOP if ended else FinishReason.LENGTH)
        assert last.stop_token_id == (expected.token_ids[-1] if ended else None)


@pytest.mark.parametrize("prefix_reuse", [True, False])
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("prompt_len", [1, 7, 16, 33])
def test_answers_and_the_prompt_is_computed_once(
    prompt_len: int, block_size: int, prefix_reuse: bool
) -> None:
    engine, executor = make_engine(
        num_blocks=400, block_size=block_size, eos=EOS, prefix_reuse=prefix_reuse, max_prefill_chunk=5
    )
    request = beam("a", prompt_len, 12, 4)
    engine.add(request)
    transcript = run(engine)
    check(transcript, request)
    assert executor.num_computed_tokens <= prompt_len + 4 * 11
    assert engine.stats().active_blocks == 0
    assert engine.stats().generated_tokens_total == sum(map(len, transcript.tokens.values()))


def test_only_last_blocks_are_copied() -> None:
    engine, executor = make_engine(block_size=4, num_blocks=200)
    engine.add(beam("a", 10, 20, 3))
    run(engine)
    step, *others = executor.plans[1:]
    # The prompt has two full blocks and two tokens of block 2: all but one hypothesis copy that one.
    assert [piece.block_table[:2] for piece in step.slices] == [(0, 1)] * 3
    assert sorted(source for source, _ in step.copy_blocks) == [2, 2]
    assert {piece.block_table[2] for piece in step.slices} == {2} | {to for _, to in step.copy_blocks}
    for plan in others:
        starts = {piece.start for piece in plan.slices}
        assert len(starts) == 1
        assert not plan.copy_blocks or starts.pop() % 4  # at the start of a block there is nothing to copy
        assert len(plan.copy_blocks) <= 2


def most_blocks(engine: Engine) -> int:
    most = 0
    while engine.has_work():
        engine.step()
        engine.check_integrity()
        most = max(most, engine.stats().active_blocks)
    return most


def test_blocks_of_a_search_are_mostly_shared() -> None:
    most = {}
    for width in (1, 4):
        engine, _ = make_engine(num_blocks=400)
        engine.add(beam("a", 512, 64, width, ignore_eos=True))
        most[width] = most_blocks(engine)
    print(f"KV blocks, prompt 512 + 64 new tokens: {most}, {most[4] / most[1]:.2f} times")
    assert most[1] == 36
    assert most[4] <= 1.6 * most[1]


def test_beside_plain_requests_and_other_searches() -> None:
    engine, _ = make_engine(num_blocks=400, block_size=4, eos=EOS, max_step_tokens=16, max_prefill_chunk=3)
    searches = [beam("a", 9, 10, 4, num_choices=2), beam("b", 30, 8, 3), beam("c", 5, 15, 6, min_tokens=4)]
    plain = [make_request(f"p{index}", numbers(11, index), 9, num_choices=2) for index in range(3)]
    for search, request in zip(searches, plain, strict=True):
        engine.add(search)
        engine.add(request)
    transcript = run(engine)
    for search in searches:
        check(transcript, search)
    for request in plain:
        for choice in range(2):
            assert transcript.tokens[request.request_id, choice] == reference(request, choice, EOS)


@pytest.mark.parametrize("prefix_reuse", [True, False])
@pytest.mark.parametrize("block_size", [1, 4])
def test_all_hypotheses_go_and_come_back_together(block_size: int, prefix_reuse: bool) -> None:
    engine, executor = make_engine(
        num_blocks={1: 86, 4: 26}[block_size],  # what one search may need
        block_size=block_size,
        prefix_reuse=prefix_reuse,
        expected_output_tokens=1,
        max_prefill_chunk=6,
    )
    requests = [beam(name, 10, 20, 4) for name in "abc"]
    for request in requests:
        engine.add(request)
    transcript = run(engine)
    assert engine.stats().preemptions_total > 0
    for request in requests:
        check(transcript, request, ())
    for plan in executor.plans:  # four rows of a search or none
        rows = [piece for piece in plan.slices if piece.sample is not None and piece.sample.output_token_ids]
        assert len(rows) % 4 == 0


def test_an_urgent_plain_request_takes_the_place_of_a_search() -> None:
    engine, _ = make_engine(num_blocks=24, block_size=2, expected_output_tokens=1)
    search = beam("a", 6, 14, 3, priority=1)
    engine.add(search)
    transcript = Transcript()
    for _ in range(4):
        transcript.take(engine.step())
    urgent = make_request("u", numbers(20), 22)
    engine.add(urgent)
    run(engine, transcript)
    assert engine.stats().preemptions_total > 0
    check(transcript, search, ())
    assert transcript.tokens["u", 0] == reference(urgent)


def test_the_prompt_comes_from_the_cache_and_goes_there() -> None:
    engine, executor = make_engine(block_size=4, num_blocks=200, eos=EOS)
    request = beam("a", 18, 6, 4)
    engine.add(make_request("p", request.prompt_token_ids, 1))
    run(engine)
    engine.add(request)
    transcript = run(engine)
    check(transcript, request)
    assert transcript.cached("a") == 16
    assert len(executor.plans[1].slices[0].token_ids) == 2
    engine.add(make_request("q", request.prompt_token_ids, 1))
    assert run(engine).cached("q") == 16


def test_logprobs_and_prompt_scores() -> None:
    engine, _ = make_engine(num_blocks=100, block_size=4, eos=EOS)
    request = beam("a", 9, 6, 3, num_logprobs=0, num_prompt_logprobs=1)
    engine.add(request)
    transcript = run(engine)
    check(transcript, request)
    for choice in range(3):
        chunk = transcript.last["a", choice]
        assert chunk.logprobs is not None
        assert tuple(score.token_id for score in chunk.logprobs) == chunk.token_ids
        assert chunk.prompt_logprobs is None
    assert transcript.first["a", 0].prompt_logprobs == reference_scores(request)


def test_that_it_has_begun_is_said_once_and_at_once() -> None:
    """Whoever places requests has to tell a search under way from one that waits."""
    engine, _ = make_engine(num_blocks=100, block_size=4, eos=EOS)
    request = beam("a", 19, 6, 3)
    engine.add(make_request("p", request.prompt_token_ids, 1))
    run(engine)
    engine.add(request)
    (begun,) = engine.step()
    assert (begun.choice, begun.token_ids, begun.num_cached_tokens) == (0, (), 16)
    assert begun.times is not None and begun.finish_reason is None
    transcript = run(engine)
    check(transcript, request)
    assert [transcript.last["a", choice].num_cached_tokens for choice in range(3)] == [0, 16, 16]
    assert [transcript.last["a", choice].times for choice in range(3)] == [None, begun.times, begun.times]
    short = beam("b", 9, 1, 3)  # over in its first step: all of it is said there
    engine.add(short)
    check(run(engine), short)


def test_one_that_is_preempted_does_not_say_again_that_it_has_begun() -> None:
    engine, _ = make_engine(num_blocks=26, block_size=4, expected_output_tokens=1)
    for name in "abc":
        engine.add(beam(name, 10, 20, 4))
    chunks = []
    while engine.has_work():
        chunks += engine.step()
    assert engine.stats().preemptions_total > 0
    begun = [chunk.request_id for chunk in chunks if chunk.finish_reason is None]
    assert sorted(begun) == ["a", "b", "c"]


def test_an_abort_in_the_middle_leaves_nothing() -> None:
    engine, _ = make_engine(num_blocks=100, block_size=4, eos=EOS)
    engine.add(beam("a", 9, 30, 4, num_choices=2, ignore_eos=True))
    assert len(engine.step()) == 1
    for _ in range(6):
        assert engine.step() == []
    assert engine.unfinished_choices("a") == (0, 1)  # type: ignore[arg-type]
    assert engine.stats().num_running == 4
    assert engine.abort("a")  # type: ignore[arg-type]
    engine.check_integrity()
    stats = engine.stats()
    assert (stats.active_blocks, stats.running_tokens, stats.num_running) == (0, 0, 0)
    assert not engine.has_work()


def test_a_hypothesis_that_is_no_number_ends_the_search() -> None:
    engine, executor = make_engine(num_blocks=100, block_size=4, eos=EOS)
    other = beam("b", 9, 12, 4)
    for request in (beam("a", 9, 12, 4), other):
        engine.add(request)
    engine.step()
    engine.step()
    left = [True]

    def spoil(piece: object) -> str | None:
        return "not a number" if left and left.pop() else None

    executor.spoil = spoil
    transcript = run(engine)
    assert [transcript.last["a", choice].error_code for choice in range(4)] == ["numerical_error"] * 4
    check(transcript, other)
    assert engine.stats().active_blocks == 0


def test_a_step_that_raises_ends_one_search_and_the_other_goes_on() -> None:
    engine, executor = make_engine(num_blocks=100, block_size=4, eos=EOS)
    requests = [beam("a", 9, 12, 4), beam("b", 10, 12, 3)]
    for request in requests:
        engine.add(request)
    for _ in range(4):
        engine.step()
    bad = engine._requests["a"][0].prompt  # type: ignore[index]

    def fail(plan: StepPlan) -> None:
        for piece in plan.slices:
            if piece.sample is not None and piece.sample.prompt_token_ids == bad:
                raise RuntimeError("no")

    executor.before_step = fail
    transcript = run(engine)
    assert transcript.last["a", 3].error_code == "internal_error"
    check(transcript, requests[1])


def test_width_64() -> None:
    engine, _ = make_engine(num_blocks=1000, block_size=16, eos=EOS)
    request = beam("a", 20, 6, 64)
    engine.add(request)
    check(run(engine), request)


@pytest.mark.parametrize(
    ("options", "code", "param"),
    [
        ({"width": 65}, "invalid_value", "best_of"),
        ({"width": 2, "num_choices": 3}, "invalid_value", "best_of"),
        ({"width": 9}, "beam_width_too_large", "best_of"),
        ({"width": 2, "max_tokens": 0}, "invalid_value", "max_tokens"),
        ({"width": 2, "temperature": 0.5}, "invalid_value", "temperature"),
        ({"width": 4, "max_tokens": 60}, "kv_pool_too_small", "max_tokens"),
    ],
)
def test_what_is_refused(options: dict[str, int], code: str, param: str) -> None:
    engine, _ = make_engine(num_blocks=20, block_size=4, max_step_tokens=8)
    with pytest.raises(RequestRefused) as refused:
        engine.add(beam("a", 3, **{"max_tokens": 4, "num_choices": 1, **options}))  # type: ignore[arg-type]
    assert (refused.value.code, refused.value.param) == (code, param)
    assert not engine.has_work()


@pytest.mark.parametrize(
    ("params", "param"),
    [
        (BeamParams(width=0), "best_of"),
        (BeamParams(width=2, length_penalty=float("nan")), "length_penalty"),
        (BeamParams(width=2, length_penalty=10.5), "length_penalty"),
        (BeamParams(width=2, early_stopping=True), "early_stopping"),  # type: ignore[arg-type]
    ],
)
def test_params_out_of_range(params: BeamParams, param: str) -> None:
    engine, _ = make_engine()
    with pytest.raises(RequestRefused) as refused:
        engine.add(make_request("a", numbers(3), beam=params))
    assert refused.value.param == param
