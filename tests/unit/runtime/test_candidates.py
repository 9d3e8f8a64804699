"""Candidates of beam searches from rows of logits, alone and beside rows that are sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from tests.unit.runtime.factories import GREEDY, piece, task
from workers.engine.step import SampleTask, StepPlan
from workers.kernels import NOT_FINITE, Drawn, kernels_for
from workers.runtime.candidates import find_candidates
from workers.runtime.results import ResultBuilder

LOGITS = torch.tensor([[0.0, 2.0, -1.0, 2.0, 1.0], [5.0, 0.0, 0.0, 0.0, 0.0]])
LOGPROBS = LOGITS.log_softmax(-1)


def search(num_candidates: int, **options: object) -> SampleTask:
    return replace(task(prompt=(1,), **options), num_candidates=num_candidates)  # type: ignore[arg-type]


def ids(candidates: Sequence[tuple[int, float, object]] | None) -> list[int]:
    assert candidates is not None
    return [candidate[0] for candidate in candidates]


def test_the_best_come_first_and_of_equals_the_lowest_id() -> None:
    first, second = find_candidates(LOGITS, [1, 0], [search(3), search(4)])
    assert (ids(first), ids(second)) == ([1, 3, 4], [0, 1, 2, 3])
    assert first is not None
    assert [found.score for found in first] == pytest.approx(LOGPROBS[0, [1, 3, 4]].tolist())
    assert [found.logprob for found in first] == [None] * 3


def test_a_row_that_is_not_finite_has_none() -> None:
    assert find_candidates(LOGITS, [NOT_FINITE, 0], [search(1), search(1)])[0] is None


def test_penalties_change_scores_and_not_logprobs() -> None:
    """As in transformers: log-probabilities are adjusted, and do not add up to 1 any more."""
    asked = search(5, repetition_penalty=2.0, logit_bias=((2, 4.0),), forbidden=(3,), num_logprobs=1)
    found, other = find_candidates(LOGITS, [1, 0], [asked, search(5)])
    expected = LOGPROBS[0].clone()
    expected[1] *= 2.0
    expected[2] += 4.0
    assert found is not None
    assert ids(found) == [2, 1, 4, 0]  # 3 is forbidden
    assert [each.score for each in found] == pytest.approx(expected[[2, 1, 4, 0]].tolist())
    for each in found:
        assert each.logprob is not None and each.logprob.token_id == each.token_id
        assert each.logprob.logprob == pytest.approx(float(LOGPROBS[0, each.token_id]))
        assert each.logprob.top == ((1, pytest.approx(float(LOGPROBS[0, 1]))),)
    assert other is not None
    assert [each.score for each in other] == pytest.approx(LOGPROBS[1].tolist())


def test_searches_beside_sampled_rows_and_scores() -> None:
    plan = StepPlan(
        number=1,
        slices=[
            piece([7], blocks=[0], sample=task()),
            piece([1, 2], blocks=[1], targets=[2, 3], sample=search(2)),
            piece([9], blocks=[2], sample=search(3)),
        ],
        num_searches=2,
    )
    kernels = kernels_for(torch.device("cpu"), torch.float32)
    logits = torch.stack([LOGITS[1], LOGITS[0], LOGITS[1], LOGITS[0], LOGITS[1]])
    builder = ResultBuilder(plan, kernels)
    builder.take(Drawn(logits, kernels.draw(logits, builder.draws, only_finite=True)))
    plain, chunk, row = builder.results().slices
    assert ([each.token_id for each in plain.sampled], plain.candidates) == ([0], ())
    assert (ids(chunk.candidates), chunk.sampled) == ([1, 3], ())
    assert [score.token_id for score in chunk.prompt_logprobs] == [2, 3]
    assert ids(row.candidates) == [0, 1, 2]


def test_greedy_is_the_first_candidate() -> None:
    (found,) = find_candidates(LOGITS[:1], [1], [replace(search(1), params=GREEDY)])
    assert ids(found) == [1]
