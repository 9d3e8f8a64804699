"""Choices that another group has begun: they go on with the tokens they would have had there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.engine.toy import make_engine, make_request, numbers, reference, run
from workers.types import BegunChoice, FinishReason, GenerateRequest, RequestRefused


def begun_at(request: GenerateRequest, *positions: int | None) -> GenerateRequest:
    """The request with so many right tokens of each choice; a choice with None has ended."""
    begun = tuple(
        BegunChoice(choice=choice, token_ids=tuple(reference(request, choice)[:position]))
        for choice, position in enumerate(positions)
        if position is not None
    )
    return replace(request, begun=begun)


@pytest.mark.parametrize("position", [0, 1, 7, 8, 19])
@pytest.mark.parametrize("prefix_reuse", [True, False])
def test_goes_on_where_the_other_group_was(position: int, prefix_reuse: bool) -> None:
    request = make_request("r", numbers(21), 20, temperature=1.0, min_tokens=12, num_logprobs=0)
    engine, _ = make_engine(block_size=4, prefix_reuse=prefix_reuse, max_prefill_chunk=5)
    engine.add(begun_at(request, position))
    transcript = run(engine)
    assert transcript.tokens["r", 0] == reference(request)[position:]
    assert transcript.reason("r") is FinishReason.LENGTH


def test_each_choice_goes_on_from_its_own_tokens_and_ended_ones_are_not_computed() -> None:
    request = make_request("r", numbers(9), 12, num_choices=4, temperature=1.0)
    engine, _ = make_engine(block_size=4)
    engine.add(begun_at(request, None, 3, 0, 11))
    assert engine.unfinished_choices(request.request_id) == (1, 2, 3)
    transcript = run(engine)
    expected = {("r", 1): 3, ("r", 2): 0, ("r", 3): 11}
    assert transcript.tokens == {
        key: reference(request, key[1])[position:] for key, position in expected.items()
    }


def test_goes_on_under_preemption() -> None:
    requests = [make_request(str(i), numbers(10, i), 20, temperature=1.0) for i in range(4)]
    engine, _ = make_engine(block_size=4, num_blocks=14, expected_output_tokens=1)
    for number, request in enumerate(requests):
        engine.add(begun_at(request, 3 * number))
    transcript = run(engine)
    for number, request in enumerate(requests):
        assert transcript.tokens[str(number), 0] == reference(request)[3 * number :]
    assert engine.stats().preemptions_total > 0


def test_what_was_computed_for_it_before_is_found_in_the_cache() -> None:
    request = make_request("r", numbers(8), 20)
    engine, executor = make_engine(block_size=4)
    engine.add(request)
    run(engine)
    before = executor.num_computed_tokens
    engine.add(begun_at(replace(request, request_id="again"), 15))  # type: ignore[arg-type]
    transcript = run(engine)
    assert transcript.tokens["again", 0] == reference(request)[15:]
    assert transcript.cached("again") == 8  # of the prompt
    stats = engine.stats()
    assert (stats.prompt_tokens_total, stats.cached_tokens_total) == (8 + 8, 8)
    assert executor.num_computed_tokens - before == 8 + 20 - 1 - 20


def test_the_first_choice_that_goes_on_has_the_prompt_to_compute_whatever_its_number() -> None:
    engine, _ = make_engine(block_size=4)
    engine.add(begun_at(make_request("r", numbers(21), 8, num_choices=3), None, 2, 5))
    # The other one shares the five full blocks of the prompt, and has a token of it and five of its own.
    assert engine.stats().waiting_tokens == (21 + 2) + (1 + 5)


@pytest.mark.parametrize(
    ("begun", "message"),
    [
        ([(0, (5, 97))], r"begun\[0\]\.token_ids\[1\] is 97"),
        ([(2, ())], r"begun\[0\]\.choice is 2"),
        ([(1, ()), (0, ())], r"begun\[1\]\.choice is 0"),
        ([(0, tuple(range(8)))], r"begun\[0\] has 8 tokens: one that goes on has at most 7"),
    ],
)
def test_what_cannot_be_a_beginning_is_refused(
    begun: list[tuple[int, tuple[int, ...]]], message: str
) -> None:
    request = make_request("r", numbers(5), 8, num_choices=2)
    choices = tuple(BegunChoice(choice=choice, token_ids=token_ids) for choice, token_ids in begun)
    engine, _ = make_engine()
    with pytest.raises(RequestRefused, match=message):
        engine.add(replace(request, begun=choices))
    assert not engine.has_work()
