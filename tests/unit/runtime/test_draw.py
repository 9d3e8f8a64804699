"""Draws against the exact distribution, the filters one by one, and independence of the rows around."""

from __future__ import annotations

import math

import pytest
import torch

from tests.unit.runtime.factories import RANDOM, task
from workers.runtime.draw import Draw, best_ids, draw_ids
from workers.runtime.sampler import sample

VOCAB_SIZES = (1, 5, 127, 128, 129, 300, 1000)


def draw(uniform: float, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0):
    return Draw(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, uniform=uniform)


def random_logits(rows: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed))


def exact_distribution(
    logits: torch.Tensor, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> list[float]:
    """The textbook form, in float64, with Python's sort."""
    probabilities = (logits.double() / temperature).softmax(-1).tolist()
    order = sorted(range(len(probabilities)), key=lambda token: (-probabilities[token], token))
    if top_k:
        order = order[:top_k]
    mass = math.fsum(probabilities[token] for token in order)
    kept, before = [], 0.0
    for token in order:
        if kept and before >= top_p * mass:
            break
        kept.append(token)
        before += probabilities[token]
    kept = [token for token in kept if probabilities[token] >= min_p * probabilities[order[0]]]
    mass = math.fsum(probabilities[token] for token in kept)
    return [probabilities[token] / mass if token in kept else 0.0 for token in range(len(probabilities))]


FILTERS = [
    {},
    {"temperature": 0.6},
    {"top_k": 7},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"temperature": 1.7, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 0.8, "top_p": 0.95, "min_p": 0.05},
]


@pytest.mark.parametrize("vocab_size", [40, 300])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_equally_spaced_uniforms_give_the_exact_distribution(filters, vocab_size):
    """Inverse of the cumulative distribution: N even points give each id its share of N, to within one."""
    logits = random_logits(1, vocab_size, seed=vocab_size)
    points = 2000
    draws = [draw((i + 0.5) / points, **filters) for i in range(points)]
    counts = torch.bincount(draw_ids(logits.expand(points, -1), draws), minlength=vocab_size).tolist()
    expected = exact_distribution(logits[0], **filters)
    for count, probability in zip(counts, expected, strict=True):
        assert abs(count - points * probability) <= 1.01
        assert count == 0 or probability > 0


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_chi_square_over_positions(filters):
    """5,000 positions of one seeded request, as the sampler numbers them."""
    vocab_size, positions = 30, 5000
    logits = random_logits(1, vocab_size, seed=4) / 2
    params = {"seed": 11, **filters}
    tasks = [task(RANDOM, prompt=range(position), **params) for position in range(1, positions + 1)]
    counts = [0] * vocab_size
    for found in sample(logits.expand(positions, -1), tasks):
        assert found is not None
        counts[found.token_id] += 1
    expected = exact_distribution(logits[0], **filters)
    assert all(count == 0 for count, p in zip(counts, expected, strict=True) if p == 0)
    cells = [(count, positions * p) for count, p in zip(counts, expected, strict=True) if positions * p >= 5]
    statistic = sum((count - mean) ** 2 / mean for count, mean in cells)
    freedom = len(cells) - 1
    # 99.99 % quantile by the approximation of Wilson and Hilferty (1931).
    limit = freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < limit


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_best_id_is_the_lowest_of_the_largest(vocab_size):
    logits = random_logits(8, vocab_size).round()  # many ties
    expected = [row.index(max(row)) for row in logits.tolist()]
    assert best_ids(logits).tolist() == expected
    logits[:] = 0
    assert best_ids(logits).tolist() == [0] * 8


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_rows_do_not_depend_on_their_neighbours(vocab_size, filters):
    filters = {**filters, "top_k": min(filters.get("top_k", 0), vocab_size)}
    logits = random_logits(16, vocab_size, seed=1)
    draws = [draw((i + 0.5) / 16, **filters) for i in range(16)]
    mixed = [draws[i] if i % 3 else draw(0.4, temperature=2.0, top_k=min(3, vocab_size)) for i in range(16)]
    together, beside = draw_ids(logits, draws).tolist(), draw_ids(logits, mixed).tolist()
    alone = [int(draw_ids(logits[i : i + 1], [draws[i]])) for i in range(16)]
    assert together == alone
    assert [beside[i] for i in range(16) if i % 3] == [alone[i] for i in range(16) if i % 3]


def test_extreme_uniforms_stay_inside():
    for vocab_size in VOCAB_SIZES:
        logits = random_logits(2, vocab_size)
        logits[:, 0] = logits[:, -1] = -200.0  # no mass in float32
        last = 1.0 - 2.0**-53
        for ids in (
            draw_ids(logits, [draw(0.0), draw(last)]),
            draw_ids(logits, [draw(0.0, top_p=0.9), draw(last, top_p=0.9)]),
        ):
            assert all(0 <= token < vocab_size for token in ids.tolist())
            if vocab_size > 2:
                assert all(0 < token < vocab_size - 1 for token in ids.tolist())


def test_top_k_takes_the_lowest_ids_of_a_tie():
    logits = torch.zeros(1, 1000)
    logits[0, 500] = 1.0
    points = [(i + 0.5) / 300 for i in range(300)]
    found = {int(draw_ids(logits, [draw(u, top_k=3)])) for u in points}
    assert found == {0, 1, 500}
    # A row with a larger k beside it makes topk look further; the result is the same.
    found = {draw_ids(logits.expand(2, -1), [draw(u, top_k=3), draw(u, top_k=9)]).tolist()[0] for u in points}
    assert found == {0, 1, 500}


def test_top_p_takes_the_lowest_ids_of_a_tie():
    logits = torch.zeros(1, 10)
    found = {int(draw_ids(logits, [draw((i + 0.5) / 100, top_p=0.3)])) for i in range(100)}
    assert found == {0, 1, 2}


def test_a_large_flat_vocabulary_keeps_what_top_p_needs():
    logits = torch.zeros(1, 20_000)
    found = [int(draw_ids(logits, [draw(u, top_p=0.5)])) for u in (0.0, 0.5, 1 - 2.0**-53)]
    assert found == [0, 5000, 9999]


def test_negligible_temperature_draws_the_best():
    logits = random_logits(4, 300)
    ids = draw_ids(logits, [draw(0.999, temperature=1e-5)] * 4)
    assert ids.tolist() == logits.argmax(-1).tolist()


def test_huge_temperature_draws_evenly():
    logits = random_logits(1, 4)
    found = [int(draw_ids(logits, [draw((i + 0.5) / 4, temperature=1e300)])) for i in range(4)]
    assert found == [0, 1, 2, 3]
