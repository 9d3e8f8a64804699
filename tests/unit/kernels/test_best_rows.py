"""Steps of which ids are all that is wanted: the best ones, found without the logits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.unit.kernels.builds import PACKED, TILE_BUILDS, build
from tests.unit.kernels.test_fused import HIDDEN, VOCAB, empty, make_model, noise, step_of
from workers.kernels import NOT_FINITE, Draw, FusedStep, unpack
from workers.kernels.native import CpuKernels

BEST = Draw(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, uniform=0.0)
ANY = Draw(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, uniform=0.4)
MARK = 12345.0


@pytest.fixture(params=PACKED)
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    return CpuKernels(build(request.param), torch.bfloat16)


def marks_left(step: FusedStep, length: int, draws: list[Draw], *, ids_only: bool) -> tuple[list[int], bool]:
    """The ids of a prompt's rows, and whether no logits have been written."""
    message, rows = step_of([(0, length)], list(range(length))), len(draws)
    assert rows == length
    step(message, None, empty()).logits.fill_(MARK)
    found = step(message, None, empty(), draws, ids_only=ids_only)
    return found.ids, bool((found.logits == MARK).all())


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_ids_are_those_of_the_logits(kernels: CpuKernels, has_bias: bool, threads: int) -> None:
    """Every logit is there six times: the first of equal ones is the best."""
    torch.set_num_threads(threads)
    weight = torch.randn(VOCAB // 6, HIDDEN).bfloat16().repeat(6, 1)
    # All logits below 0, which columns that do not exist would have.
    bias = (torch.randn(VOCAB // 6) - 100).bfloat16().repeat(6) if has_bias else None
    model = make_model(kernels, torch.bfloat16, bias=False, head_norm=False)
    step = kernels.fuse(replace(model, head=kernels.pack_linear(weight, bias, torch.float32)))
    assert step is not None
    for length in (1, 2, 5, 17, 40, 100):
        wanted, are_left = marks_left(step, length, [BEST] * length, ids_only=False)
        assert not are_left and max(wanted) < VOCAB // 6
        assert length < 40 or len(set(wanted)) > 5
        assert marks_left(step, length, [BEST] * length, ids_only=True)[0] == wanted


@pytest.mark.parametrize("name", TILE_BUILDS)
def test_logits_are_made_only_where_something_else_is_drawn(name: str) -> None:
    kernels = CpuKernels(build(name), torch.bfloat16)
    step = kernels.fuse(make_model(kernels, torch.bfloat16, bias=True, head_norm=True))
    assert step is not None
    assert marks_left(step, 3, [BEST] * 3, ids_only=True)[1]
    ids, are_left = marks_left(step, 3, [BEST, ANY, BEST], ids_only=True)
    assert not are_left and ids == marks_left(step, 3, [BEST, ANY, BEST], ids_only=False)[0]


def test_one_infinite_logit_is_enough_for_no_id(kernels: CpuKernels) -> None:
    bias = torch.zeros(VOCAB, dtype=torch.bfloat16)
    bias[VOCAB - 2] = -torch.inf
    model = make_model(kernels, torch.bfloat16, bias=False, head_norm=False)
    weight = torch.randn(VOCAB, HIDDEN).bfloat16()
    step = kernels.fuse(replace(model, head=kernels.pack_linear(weight, bias, torch.float32)))
    assert step is not None
    message = step_of([(0, 5)], list(range(5)))
    assert step(message, None, empty(), [BEST] * 5, ids_only=True).ids == [NOT_FINITE] * 5


def test_rows_that_are_not_finite_have_no_id(kernels: CpuKernels) -> None:
    torch.set_num_threads(2)
    model = make_model(kernels, torch.bfloat16, bias=True, head_norm=True)
    step = kernels.fuse(model)
    assert step is not None
    message, kv = step_of([(70, 1), (3, 2), (64, 1)], [0, 1, 2, 3]), noise()
    right = step(message, None, kv.clone(), [BEST] * 4, ids_only=True).ids
    assert min(right) >= 0
    model.embedding[unpack(message).token_ids[1]] = torch.nan
    ids = step(message, None, kv.clone(), [BEST] * 4, ids_only=True).ids
    assert ids == [right[0], NOT_FINITE, NOT_FINITE, right[3]]
