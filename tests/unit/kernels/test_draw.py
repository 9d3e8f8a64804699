"""Draws against the exact distribution, the filters one by one, and independence of the rows around."""

from __future__ import annotations

import math

import pytest
import torch

from tests.unit.kernels.builds import MARCHES, build
from workers.kernels import NOT_FINITE, Draw, Kernels, TorchKernels
from workers.kernels.native import CpuKernels


@pytest.fixture(params=["torch", *MARCHES])
def kernels(request) -> Kernels:
    return TorchKernels() if request.param == "torch" else CpuKernels(build(request.param), torch.float32)


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
def test_equally_spaced_uniforms_give_the_exact_distribution(kernels, filters, vocab_size):
    """Inverse of the cumulative distribution: N even points give each id its share of N, to within one."""
    logits = random_logits(1, vocab_size, seed=vocab_size)
    points = 2000
    draws = [draw((i + 0.5) / points, **filters) for i in range(points)]
    counts = torch.bincount(
        torch.tensor(kernels.draw(logits.expand(points, -1), draws)), minlength=vocab_size
    ).tolist()
    expected = exact_distribution(logits[0], **filters)
    for count, probability in zip(counts, expected, strict=True):
        assert abs(count - points * probability) <= 1.01
        assert count == 0 or probability > 0


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_best_id_is_the_lowest_of_the_largest(kernels, vocab_size):
    logits = random_logits(8, vocab_size).round()  # many ties
    expected = [row.index(max(row)) for row in logits.tolist()]
    assert kernels.draw(logits, [draw(0.5, temperature=0.0)] * len(logits)) == expected
    logits[:] = 0
    assert kernels.draw(logits, [draw(0.5, temperature=0.0)] * len(logits)) == [0] * 8


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_rows_do_not_depend_on_their_neighbours(kernels, vocab_size, filters):
    filters = {**filters, "top_k": min(filters.get("top_k", 0), vocab_size)}
    logits = random_logits(16, vocab_size, seed=1)
    draws = [draw((i + 0.5) / 16, **filters) for i in range(16)]
    mixed = [draws[i] if i % 3 else draw(0.4, temperature=2.0, top_k=min(3, vocab_size)) for i in range(16)]
    together, beside = kernels.draw(logits, draws), kernels.draw(logits, mixed)
    alone = [kernels.draw(logits[i : i + 1], [draws[i]])[0] for i in range(16)]
    assert together == alone
    assert [beside[i] for i in range(16) if i % 3] == [alone[i] for i in range(16) if i % 3]


def test_extreme_uniforms_stay_inside(kernels):
    for vocab_size in VOCAB_SIZES:
        logits = random_logits(2, vocab_size)
        logits[:, 0] = logits[:, -1] = -200.0  # no mass in float32
        last = 1.0 - 2.0**-53
        for ids in (
            kernels.draw(logits, [draw(0.0), draw(last)]),
            kernels.draw(logits, [draw(0.0, top_p=0.9), draw(last, top_p=0.9)]),
        ):
            assert all(0 <= token < vocab_size for token in ids)
            if vocab_size > 2:
                assert all(0 < token < vocab_size - 1 for token in ids)


def test_top_k_takes_the_lowest_ids_of_a_tie(kernels):
    logits = torch.zeros(1, 1000)
    logits[0, 500] = 1.0
    points = [(i + 0.5) / 300 for i in range(300)]
    found = {kernels.draw(logits, [draw(u, top_k=3)])[0] for u in points}
    assert found == {0, 1, 500}
    # A row with a larger k beside it makes topk look further; the result is the same.
    found = {kernels.draw(logits.expand(2, -1), [draw(u, top_k=3), draw(u, top_k=9)])[0] for u in points}
    assert found == {0, 1, 500}


def test_top_p_takes_the_lowest_ids_of_a_tie(kernels):
    logits = torch.zeros(1, 10)
    found = {kernels.draw(logits, [draw((i + 0.5) / 100, top_p=0.3)])[0] for i in range(100)}
    assert found == {0, 1, 2}


def test_a_large_flat_vocabulary_keeps_what_top_p_needs(kernels):
    logits = torch.zeros(1, 20_000)
    found = [kernels.draw(logits, [draw(u, top_p=0.5)])[0] for u in (0.0, 0.5, 1 - 2.0**-53)]
    assert found == [0, 5000, 9999]


def test_negligible_temperature_draws_the_best(kernels):
    logits = random_logits(4, 300)
    ids = kernels.draw(logits, [draw(0.999, temperature=1e-5)] * 4)
    assert ids == logits.argmax(-1).tolist()


def test_huge_temperature_draws_evenly(kernels):
    logits = random_logits(1, 4)
    found = [kernels.draw(logits, [draw((i + 0.5) / 4, temperature=1e300)])[0] for i in range(4)]
    assert found == [0, 1, 2, 3]


LARGE_K = [{"top_k": 1000}, {"top_k": 30, "top_p": 0.7}, {"temperature": 30.0, "top_p": 0.99}]


@pytest.mark.parametrize("spread", [0.01, 8.0])
@pytest.mark.parametrize("filters", [*FILTERS, *LARGE_K], ids=str)
def test_many_ids_with_ties_are_drawn_as_by_torch(filters, spread):
    """A point between two ids may fall to either by rounding."""
    kernels = CpuKernels(build("native"), torch.float32)
    logits = (random_logits(8, 5000, seed=5) * spread).bfloat16().float()
    draws = [draw((i + 0.5) / 8, **filters) for i in range(8)]
    found, wanted = kernels.draw(logits, draws), TorchKernels().draw(logits, draws)
    assert sum(a != b for a, b in zip(found, wanted, strict=True)) <= 1


@pytest.mark.parametrize("how", [{"temperature": 0.0}, {}, {"top_p": 0.9}, {"top_k": 5}], ids=str)
@pytest.mark.parametrize("vocab_size", [1, 300, 5000])
def test_rows_that_are_not_finite_get_no_id(kernels, how, vocab_size):
    logits = random_logits(5, vocab_size)
    draws = [draw(i / 5, **how) for i in range(5)]
    good = kernels.draw(logits, draws)
    assert kernels.draw(logits, draws, only_finite=True) == good
    logits[1, -1], logits[2, vocab_size // 2], logits[3, 0] = math.nan, math.inf, -math.inf
    found = kernels.draw(logits, draws, only_finite=True)
    assert found == [good[0], NOT_FINITE, NOT_FINITE, NOT_FINITE, good[4]]
    ids = kernels.draw_ids(logits, draws)
    assert (ids.dtype, ids.tolist()) == (torch.int64, found)


def test_forbidden_ids_are_not_drawn(kernels):
    logits = torch.full((3, 200), -math.inf)
    logits[:, 150] = -3e38
    draws = [draw(0.0), draw(0.99, temperature=1e300, top_k=3), draw(0.5, top_p=0.5)]
    assert kernels.draw(logits, draws) == [150] * 3
