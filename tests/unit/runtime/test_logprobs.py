"""Scores are of the raw distribution, finite, and ordered the same way every time."""

from __future__ import annotations

import pytest
import torch

from tests.unit.runtime.factories import RANDOM, sample, task
from workers.runtime.logprobs import FLOOR, best_tokens, score_tokens


def test_scores_are_of_the_raw_distribution():
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(0))
    exact = logits.double().log_softmax(-1)[0].tolist()
    params = {"top_k": 3, "temperature": 0.3, "logit_bias": ((7, -100.0),), "repetition_penalty": 2.0}
    (found,) = sample(logits, [task(RANDOM, num_logprobs=4, **params)])
    assert found is not None and found.logprob is not None
    assert found.logprob.token_id == found.token_id
    assert found.logprob.logprob == pytest.approx(exact[found.token_id], abs=1e-5)
    order = sorted(range(50), key=lambda token: -exact[token])[:4]
    assert [token for token, _ in found.logprob.top] == order
    assert [value for _, value in found.logprob.top] == pytest.approx([exact[t] for t in order], abs=1e-5)


def test_zero_alternatives_and_none():
    logits = torch.randn(2, 20)
    with_score, without = sample(logits, [task(num_logprobs=0), task()])
    assert with_score is not None and with_score.logprob is not None and with_score.logprob.top == ()
    assert without is not None and without.logprob is None


def test_minus_infinity_becomes_the_floor():
    logprobs = torch.tensor([[0.0, float("-inf"), float("-inf")]])
    assert best_tokens(logprobs, 3) == [((0, 0.0), (1, FLOOR), (2, FLOOR))]
    logits = torch.tensor([[0.0, -3e38, 0.0]])
    (score,) = score_tokens(logits, [1], 0)
    assert score is not None and score.logprob == FLOOR


def test_more_alternatives_than_the_vocabulary_has():
    assert [token for token, _ in best_tokens(torch.tensor([[0.1, 0.3, 0.2]]), 20)[0]] == [1, 2, 0]


def test_ties_go_to_the_lowest_ids():
    logprobs = torch.full((1, 500), -2.0)
    logprobs[0, 400] = -1.0
    assert [token for token, _ in best_tokens(logprobs, 4)[0]] == [400, 0, 1, 2]


def test_many_rows_and_a_bad_one():
    logits = torch.randn(200, 30)
    expected = logits.log_softmax(-1)
    logits[150, 3] = float("nan")
    targets = [row % 30 for row in range(200)]
    found = score_tokens(logits, targets, 1)
    assert [row for row, score in enumerate(found) if score is None] == [150]
    for row, score in enumerate(found):
        if score is not None:
            assert score.logprob == pytest.approx(float(expected[row, targets[row]]), abs=1e-6)
            assert score.top[0][0] == int(expected[row].argmax())
