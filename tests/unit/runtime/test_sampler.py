"""The sampler as the executors call it: edge values, penalties, reproducibility, bad rows."""

from __future__ import annotations

import math

import pytest
import torch

from tests.unit.kernels.test_draw import FILTERS, exact_distribution, random_logits
from tests.unit.runtime.factories import RANDOM, sample, task
from workers.engine.step import SampleTask
from workers.runtime.adjust import adjust


def logits_of(rows: int, vocab_size: int = 200, seed: int = 3) -> torch.Tensor:
    return 2 * torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed))


def ids(logits: torch.Tensor, tasks: list[SampleTask]) -> list[int]:
    found = sample(logits, tasks)
    return [entry.token_id for entry in found if entry is not None]


@pytest.mark.parametrize(
    "edge",
    [{"temperature": t} for t in (0.0, 1e-8, 1e-38, 1e-45, 5e-324, 1e-5, 9.99e-6)]
    + [{"top_p": 1e-9}, {"top_p": 0.0}, {"top_k": 1}, {"min_p": 1.0}],
    ids=str,
)
def test_edge_values_are_greedy(edge):
    logits = logits_of(4)
    assert ids(logits, [task(RANDOM, **edge)] * 4) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("top_k", [-1, 0, 200, 1_000_000, (1 << 63) - 1])
def test_top_k_off_in_all_its_forms(top_k):
    logits = logits_of(8)
    tasks = [task(RANDOM, seed=seed, top_k=top_k) for seed in range(8)]
    assert ids(logits, tasks) == ids(logits, [task(RANDOM, seed=seed) for seed in range(8)])


def test_a_row_has_the_same_token_whatever_shares_its_batch():
    logits = logits_of(32, 500)
    kinds = [
        {"temperature": 0.0},
        {"temperature": 0.8, "top_p": 0.9},
        {"top_k": 20, "num_logprobs": 2},
        {"repetition_penalty": 1.3},
        {"temperature": 0.0, "frequency_penalty": 1.0, "logit_bias": ((5, 3.0),)},
        {"min_p": 0.1},
        {},
    ]
    tasks = [
        task(RANDOM, prompt=range(i), output=[7, 7, i], seed=i, **kinds[i % len(kinds)]) for i in range(32)
    ]
    together = sample(logits, tasks)
    assert [sample(logits[i : i + 1], [tasks[i]])[0] for i in range(32)] == together
    assert sample(logits.flip(0), tasks[::-1])[::-1] == together
    assert sample(logits[8:24], tasks[8:24]) == together[8:24]


def test_seed_position_and_choice_decide():
    logits = logits_of(1, 500) / 10
    first = ids(logits, [task(RANDOM, seed=1)])
    assert ids(logits, [task(RANDOM, seed=1)]) == first
    assert len({ids(logits, [task(RANDOM, seed=seed)])[0] for seed in range(20)}) > 10
    assert len({ids(logits, [task(RANDOM, seed=1, choice=choice)])[0] for choice in range(20)}) > 10
    assert len({ids(logits, [task(RANDOM, seed=1, output=[0] * n)])[0] for n in range(20)}) > 10
    # Position counts all tokens, wherever the prompt ends: a taken-over request goes on alike.
    resumed = task(RANDOM, prompt=(1, 2, 3, 9), output=(8,), seed=1)
    assert ids(logits, [resumed]) == ids(logits, [task(RANDOM, prompt=(1, 2, 3), output=(9, 8), seed=1)])


def test_repetition_penalty_as_in_transformers():
    from transformers import RepetitionPenaltyLogitsProcessor

    logits = logits_of(1)
    prompt, output = [3, 5, 5, 8], [9, 3]
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([prompt + output]), logits.clone())
    changed = logits.clone()
    adjust(changed[0], task(prompt=prompt, output=output, repetition_penalty=1.7))
    torch.testing.assert_close(changed, expected)


def test_presence_and_frequency_count_the_output_only():
    row = torch.zeros(10)
    adjust(row, task(prompt=[1, 2], output=[2, 2, 2, 4], presence_penalty=0.5, frequency_penalty=0.25))
    assert row.tolist() == [0, 0, -1.25, 0, -0.75, 0, 0, 0, 0, 0]


def test_bias_and_forbidden_ids():
    logits = torch.zeros(1, 10)
    assert ids(logits, [task(logit_bias=((6, 2.0), (7, 1.0)))]) == [6]
    assert ids(logits, [task(logit_bias=((6, 2.0), (7, 1.0)), forbidden=[6])]) == [7]
    drawn = {ids(logits, [task(RANDOM, seed=s, forbidden=range(8))])[0] for s in range(40)}
    assert drawn == {8, 9}


@pytest.mark.parametrize("penalty", [1e-300, 1e-30, 1e30, 1e300])
def test_extreme_penalties_stay_finite(penalty):
    logits = logits_of(1)
    logits[0, 3] = 0.0
    for params in ({"temperature": 0.0}, {}, {"top_p": 0.5}):
        (found,) = sample(logits, [task(RANDOM, prompt=[3, 4, 5], repetition_penalty=penalty, **params)])
        assert found is not None and 0 <= found.token_id < 200


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("kind", [{"temperature": 0.0}, {}, {"top_p": 0.9}, {"top_k": 5}], ids=str)
def test_a_bad_row_is_named_and_its_neighbours_are_unharmed(bad, kind):
    logits = logits_of(5)
    tasks = [task(RANDOM, seed=i, num_logprobs=2, **kind) for i in range(5)]
    good = sample(logits, tasks)
    logits[2, 17] = bad
    found = sample(logits, tasks)
    assert found[2] is None
    assert found[:2] + found[3:] == good[:2] + good[3:]


def test_logits_are_only_read():
    logits = logits_of(6)
    before = logits.clone()
    sample(
        logits,
        [
            task(),
            task(RANDOM),
            task(RANDOM, top_p=0.5),
            task(RANDOM, top_k=4),
            task(output=[3], repetition_penalty=2.0, presence_penalty=1.0, num_logprobs=3),
            task(logit_bias=((1, 50.0),), forbidden=[1]),
        ],
    )
    assert torch.equal(logits, before)


def drawn_counts(logits, **params):
    """How often each token comes in 5,000 positions of one seeded request, as the sampler numbers them."""
    tasks = [task(RANDOM, prompt=range(position), seed=11, **params) for position in range(1, 5001)]
    counts = [0] * logits.shape[1]
    for found in sample(logits.expand(len(tasks), -1), tasks):
        assert found is not None
        counts[found.token_id] += 1
    return counts


def fits(counts, expected):
    """Whether a chi-square test at 0.01 % lets the counts pass."""
    if any(count and not p for count, p in zip(counts, expected, strict=True)):
        return False
    total = sum(counts)
    cells = [(count, total * p) for count, p in zip(counts, expected, strict=True) if total * p >= 5]
    statistic = sum((count - mean) ** 2 / mean for count, mean in cells)
    freedom = len(cells) - 1
    # 99.99 % quantile by the approximation of Wilson and Hilferty (1931).
    return statistic < freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_chi_square_over_positions(filters):
    logits = random_logits(1, 30, seed=4) / 2
    assert fits(drawn_counts(logits, **filters), exact_distribution(logits[0], **filters))


def test_chi_square_notices_a_temperature_that_is_a_tenth_off():
    logits = random_logits(1, 30, seed=4) / 2
    assert not fits(drawn_counts(logits * 1.1), exact_distribution(logits[0]))
    assert not fits(drawn_counts(logits), exact_distribution(logits[0], top_k=29))
