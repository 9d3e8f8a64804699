"""The choice of ids: those of the torch form on the same logits."""

from __future__ import annotations

import math

import pytest
import torch

from tests.unit.kernels.gpu.support import REFERENCE, noise
from workers.kernels import NOT_FINITE, Draw
from workers.kernels.gpu.interpreter import DEVICE
from workers.kernels.gpu.kernels import GpuKernels

KERNELS = GpuKernels(torch.float32)
FILTERS = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.6},
    {"top_k": 7},
    {"top_k": 1000},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"temperature": 1.7, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 0.8, "top_p": 0.95, "min_p": 0.05},
    {"temperature": 30.0, "top_p": 0.99},
]


def draw(uniform: float, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0):
    return Draw(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, uniform=uniform)


@pytest.mark.parametrize(
    ("vocab_size", "spread"), [(1, 3.0), (5, 3.0), (129, 0.01), (2100, 0.01), (2100, 3.0)]
)
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_ids_are_those_of_torch(filters: dict[str, float], vocab_size: int, spread: float) -> None:
    logits = spread * noise(3, vocab_size, seed=vocab_size)
    draws = [draw((i + 0.37) / 3, **filters) for i in range(3)]
    assert KERNELS.draw(logits, draws) == REFERENCE.draw(logits, draws)


@pytest.mark.parametrize("filters", [{}, *FILTERS[4:]], ids=str)
def test_many_ties_are_drawn_as_by_torch(filters: dict[str, float]) -> None:
    """A point between two ids may fall to either by rounding."""
    logits = (3 * noise(3, 2100, seed=5)).round()
    draws = [draw((i + 0.5) / 3, **filters) for i in range(3)]
    found, wanted = KERNELS.draw(logits, draws), REFERENCE.draw(logits, draws)
    assert sum(a != b for a, b in zip(found, wanted, strict=True)) <= 1


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    logits = 3 * noise(len(FILTERS), 400, seed=1)
    draws = [draw((i + 0.5) / len(FILTERS), **filters) for i, filters in enumerate(FILTERS)]
    together = KERNELS.draw(logits, draws)
    assert together == [KERNELS.draw(logits[i : i + 1], [draws[i]])[0] for i in range(len(FILTERS))]


def test_ties_go_to_the_lowest_ids() -> None:
    logits = torch.zeros(1, 3000, device=DEVICE)
    assert KERNELS.draw(logits, [draw(0.9, temperature=0.0)]) == [0]
    logits[0, 2500] = 1.0
    points = (0.1, 0.4, 0.9)  # the last id is e times as likely
    draws = [draw(u, top_k=3) for u in points]
    assert KERNELS.draw(logits.expand(3, -1), draws) == [0, 1, 2500]
    flat = torch.zeros(3, 10, device=DEVICE)
    assert KERNELS.draw(flat, [draw(u, top_p=0.3) for u in points]) == [0, 1, 2]


def test_a_large_flat_vocabulary_keeps_what_top_p_needs() -> None:
    logits = torch.zeros(3, 20_000, device=DEVICE)
    draws = [draw(u, top_p=0.5) for u in (0.0, 0.5, 1 - 2.0**-53)]
    assert KERNELS.draw(logits, draws) == [0, 5000, 9999]


def test_extreme_uniforms_stay_inside() -> None:
    for vocab_size in (5, 2048):
        logits = noise(2, vocab_size)
        logits[:, 0] = logits[:, -1] = -200.0  # no mass in float32
        for filters in ({}, {"top_p": 0.9}, {"top_k": 4}):
            ids = KERNELS.draw(logits, [draw(0.0, **filters), draw(1.0 - 2.0**-53, **filters)])
            assert all(0 < token < vocab_size - 1 for token in ids)


def test_huge_temperature_draws_evenly() -> None:
    draws = [draw((i + 0.5) / 4, temperature=1e300) for i in range(4)]
    assert KERNELS.draw(noise(1, 4).expand(4, -1), draws) == [0, 1, 2, 3]


@pytest.mark.parametrize("how", [{"temperature": 0.0}, {}, {"top_p": 0.9}, {"top_k": 5}], ids=str)
@pytest.mark.parametrize("vocab_size", [1, 2100])
def test_rows_that_are_not_finite_get_no_id(how: dict[str, float], vocab_size: int) -> None:
    logits = noise(5, vocab_size)
    draws = [draw(i / 5, **how) for i in range(5)]
    good = KERNELS.draw(logits, draws)
    assert KERNELS.draw(logits, draws, only_finite=True) == good
    logits[1, -1], logits[2, vocab_size // 2], logits[3, 0] = math.nan, math.inf, -math.inf
    found = KERNELS.draw(logits, draws, only_finite=True)
    assert found == [good[0], NOT_FINITE, NOT_FINITE, NOT_FINITE, good[4]]
    assert KERNELS.draw_ids(logits, draws).tolist() == found


def test_forbidden_ids_are_not_drawn() -> None:
    logits = torch.full((4, 2100), -math.inf, device=DEVICE)
    logits[:, 2060] = -3e38
    draws = [draw(0.0), draw(0.99, temperature=1e300, top_k=3), draw(0.5, top_p=0.5), draw(0.5, min_p=0.1)]
    assert KERNELS.draw(logits, draws) == [2060] * 4


def test_no_rows() -> None:
    assert KERNELS.draw(noise(0, 10), []) == []
