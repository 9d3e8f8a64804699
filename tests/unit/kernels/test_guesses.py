"""Guesses in one call against the operators one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.unit.kernels.builds import PACKED, build
from workers.kernels import GuessHead, GuessModel, GuessTask, Quantization, TorchKernels
from workers.kernels.native import CpuKernels
from workers.model.medusa import MedusaHeads

HIDDEN, INNER, GUESSED, VOCAB, HEADS = 96, 160, 300, 600, 3
FORMS = [Quantization.NONE, Quantization.INT8]


@pytest.fixture(params=PACKED)
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    return CpuKernels(build(request.param), torch.bfloat16)


def make_heads(
    kernels: CpuKernels, form: Quantization = Quantization.NONE, guessed: int = GUESSED
) -> MedusaHeads:
    generator = torch.Generator().manual_seed(3)

    def weight(outputs: int, inputs: int) -> torch.Tensor:
        return (torch.randn(outputs, inputs, generator=generator) / inputs**0.5).bfloat16()

    def pack(outputs: int, inputs: int, scale: float = 1.0) -> object:
        return kernels.pack_linear(scale * weight(outputs, inputs), None, torch.float32, form)

    model = GuessModel(
        heads=tuple(
            GuessHead(state=pack(INNER, HIDDEN), tokens=weight(guessed + 1, INNER), out=pack(HIDDEN, INNER))
            for _ in range(HEADS)
        ),
        vocabulary=pack(guessed, HIDDEN, 4.0),
        token_ids=tuple(range(0, 2 * guessed, 2)),
        vocab_size=VOCAB,
    )
    return MedusaHeads(model, kernels.fuse_guesses(model))


def states(rows: int) -> torch.Tensor:
    return torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(5)).bfloat16()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("form", FORMS)
def test_one_call_finds_what_the_operators_find(
    kernels: CpuKernels, form: Quantization, threads: int
) -> None:
    heads = make_heads(kernels, form)
    assert heads.fused is not None
    tasks = [GuessTask(row % 7, 31 * row % VOCAB, 1 + row % 9, row % 4 == 0) for row in range(40)]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found, expected = (each(states(7), tasks, -3.0) for each in (heads, replace(heads, fused=None)))
    finally:
        torch.set_num_threads(before)
    depths = set()
    for one, other in zip(found, expected, strict=True):
        assert one is not None and other is not None and len(one) == len(other)
        depths.add(len(one))
        for level, wanted in zip(one, other, strict=True):
            assert [score for _, score in level] == pytest.approx([s for _, s in wanted], abs=0.02)
            assert len({token_id for token_id, _ in level} & {token_id for token_id, _ in wanted}) >= 3
            assert level[0][0] == wanted[0][0]
    assert depths == {1, 2, 3}


def test_what_a_row_gives_does_not_depend_on_others(kernels: CpuKernels) -> None:
    heads = make_heads(kernels)
    tasks = [GuessTask(row, 7 * row, 8) for row in range(20)]
    together = heads(states(20), tasks, -9.0)
    assert [heads(states(20), [task], -9.0)[0] for task in tasks] == together


def test_more_rows_than_a_pass_makes_go_in_parts(kernels: CpuKernels) -> None:
    heads = make_heads(kernels, guessed=40)
    tasks = [GuessTask(row % 5, 0, 2) for row in range(600)]
    found = heads(states(5), tasks, -9.0)
    assert found == found[:5] * 120


def test_fewer_tokens_than_a_head_says(kernels: CpuKernels) -> None:
    (levels,) = make_heads(kernels, guessed=3)(states(1), [GuessTask(0, 1, 9)], -99.0)
    assert levels is not None and [len(level) for level in levels] == [3] * HEADS
    assert all({token_id for token_id, _ in level} == {0, 2, 4} for level in levels)


def test_values_that_are_not_finite_spoil_their_row_alone(kernels: CpuKernels) -> None:
    heads, hidden = make_heads(kernels), states(3)
    tasks = [GuessTask(row, 4, 8) for row in range(3)]
    good = heads(hidden, tasks, -9.0)
    hidden[1, 5] = torch.inf
    assert heads(hidden, tasks, -9.0) == [good[0], None, good[2]]


def test_a_token_that_is_none_is_refused(kernels: CpuKernels) -> None:
    with pytest.raises(ValueError, match=r"guesses after a token outside of 0 \.\. 599: \[600\]"):
        make_heads(kernels)(states(1), [GuessTask(0, VOCAB, 2)], -9.0)


def test_no_one_call_without_packed_weights() -> None:
    heads = make_heads(CpuKernels(build("x86-64"), torch.bfloat16))
    assert heads.fused is None and TorchKernels().fuse_guesses(heads.model) is None
    assert heads(states(1), [GuessTask(0, 4, 8)], -9.0)[0]
