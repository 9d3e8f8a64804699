"""Beam search over tables of probabilities: no engine, no model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from math import log

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.decoding.beam_search import BeamSearch, Candidate, Hypothesis
from workers.types import BeamParams, EarlyStopping

Model = Callable[[tuple[int, ...]], Sequence[float]]  # tokens so far -> probability of each token
YES, NO, NEVER = EarlyStopping


def run(model: Model, search: BeamSearch) -> list[Hypothesis]:
    """Until the search is over; every step gets the candidates it asks for and no more."""
    while not search.is_over:
        before = list(search.hypotheses)
        found = []
        for hypothesis in before:
            scores = [(log(p), token) for token, p in enumerate(model(hypothesis.token_ids)) if p > 0]
            best = sorted(scores, key=lambda entry: (-entry[0], entry[1]))[: search.num_candidates]
            found.append([Candidate(token, score) for score, token in best])
        parents = search.advance(found)
        for parent, hypothesis in zip(parents, search.hypotheses, strict=True):
            assert hypothesis.token_ids[:-1] == before[parent].token_ids
    assert not search.hypotheses
    return list(search.finished)


def by_tokens(found: Sequence[Hypothesis]) -> list[tuple[tuple[int, ...], float]]:
    return [(hypothesis.token_ids, pytest.approx(hypothesis.score)) for hypothesis in found]  # type: ignore[misc]


def beam(width: int, penalty: float = 1.0, stopping: EarlyStopping = NO) -> BeamParams:
    return BeamParams(width=width, length_penalty=penalty, early_stopping=stopping)


def worked_example(before: tuple[int, ...]) -> Sequence[float]:
    if not before:
        return [0.4, 0.3, 0.2, 0.1]
    return [0.5, 0.2, 0.2, 0.1] if before[0] == 0 else [0.1, 0.6, 0.2, 0.1]


def test_the_worked_example() -> None:
    found = run(worked_example, BeamSearch(beam(2, 0.0), max_tokens=2, end_ids=()))
    assert by_tokens(found) == [((0, 0), log(0.20)), ((1, 1), log(0.18))]


def test_width_one_is_greedy() -> None:
    found = run(worked_example, BeamSearch(beam(1), max_tokens=2, end_ids=()))
    assert by_tokens(found) == [((0, 0), log(0.20) / 2)]
    found = run(ending, BeamSearch(beam(1, 2.0, NEVER), max_tokens=4, end_ids=(0,)))
    assert by_tokens(found) == [((0,), log(0.5))]


def ending(before: tuple[int, ...]) -> Sequence[float]:
    """Token 0 ends."""
    return [0.5, 0.3, 0.2] if not before else [0.4, 0.35, 0.25]


# After two tokens two have ended, (0,) with 0.5 and (1, 0) with 0.12; the best to go on is (1, 1) with 0.105.
@pytest.mark.parametrize(
    ("stopping", "penalty", "tokens"),
    [
        (YES, 1.0, [(0,), (1, 0)]),
        (YES, 2.0, [(1, 0), (0,)]),
        (NO, 1.0, [(0,), (1, 0)]),  # log(0.105) / 2 is no better than log(0.12) / 2
        (NO, -1.0, [(0,), (1, 0)]),
        (NO, 2.0, [(1, 1, 1, 0), (1, 1, 1, 1)]),  # log(0.105) / 4 is better than log(0.5)
        (NEVER, 0.0, [(0,), (1, 0)]),
        (
            NEVER,
            1.0,
            [(0,), (1, 1, 1, 0)],
        ),  # log(0.105) / 4, at the most tokens, is better than log(0.12) / 2
    ],
)
def test_when_it_stops(stopping: EarlyStopping, penalty: float, tokens: list[tuple[int, ...]]) -> None:
    found = run(ending, BeamSearch(beam(2, penalty, stopping), max_tokens=4, end_ids=(0,)))
    assert [hypothesis.token_ids for hypothesis in found] == tokens


def test_an_end_below_the_best_of_the_width_is_no_end() -> None:
    """Of width 1: token 0 ends and is second best, so it is neither finished nor gone on with."""

    def model(before: tuple[int, ...]) -> Sequence[float]:
        return [0.3, 0.6, 0.1]

    found = run(model, BeamSearch(beam(1), max_tokens=2, end_ids=(0,)))
    assert [hypothesis.token_ids for hypothesis in found] == [(1, 1)]


def test_every_token_ends() -> None:
    found = run(worked_example, BeamSearch(beam(3), max_tokens=5, end_ids=(0, 1, 2, 3)))
    assert [hypothesis.token_ids for hypothesis in found] == [(0,), (1,), (2,)]


@settings(max_examples=60, deadline=None)
@given(
    weights=st.lists(st.integers(1, 1000), min_size=39, max_size=39, unique=True),
    penalty=st.sampled_from([-1.0, 0.0, 0.6, 1.0, 2.0]),
)
def test_a_beam_as_wide_as_all_there_is_finds_the_best(weights: list[int], penalty: float) -> None:
    """Three tokens, three steps, none ends: nothing is ever cut away, so the order is the true one."""

    def model(before: tuple[int, ...]) -> Sequence[float]:
        place = 3 * int("0" + "".join(map(str, (1, *before))), 3) % 36
        part = weights[place : place + 3]
        return [weight / sum(part) for weight in part]

    def score(tokens: tuple[int, ...]) -> float:
        return sum(log(model(tokens[:i])[token]) for i, token in enumerate(tokens)) / 3**penalty

    found = run(model, BeamSearch(beam(27, penalty), max_tokens=3, end_ids=()))
    expected = sorted((score(tokens) for tokens in product(range(3), repeat=3)), reverse=True)
    assert [hypothesis.score for hypothesis in found] == pytest.approx(expected)
    assert [score(hypothesis.token_ids) for hypothesis in found] == pytest.approx(expected)
