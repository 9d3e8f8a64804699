"""The mixture of experts against a loop over rows, whole and in the parts of several ranks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.unit.kernels.builds import PACKED, build
from workers.kernels import Kernels, TorchKernels
from workers.kernels.native import CpuKernels
from workers.model.architecture import Activation, ExpertsSpec
from workers.model.experts import ExpertMlp, Router, add_slots
from workers.model.mlp import DenseMlp

HIDDEN, INNER = 32, 24


class Weights:
    """Of one layer, drawn at random."""

    def __init__(self, spec: ExpertsSpec, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(3)

        def draw(*shape: int) -> torch.Tensor:
            return (torch.randn(shape, generator=generator) * shape[-1] ** -0.5).to(dtype)

        self.spec = spec
        self.gate = draw(spec.count, HIDDEN)
        self.up = draw(spec.count, 2 * INNER, HIDDEN)
        self.down = draw(spec.count, HIDDEN, INNER)

    def mlp(self, kernels: Kernels, rank: int = 0, size: int = 1) -> ExpertMlp:
        own = self.spec.of_rank(rank, size)
        return ExpertMlp(
            router=Router(
                gate=kernels.pack_linear(self.gate, None, torch.float32),
                per_token=self.spec.per_token,
                is_renormalized=self.spec.is_renormalized,
            ),
            experts=tuple(
                DenseMlp(
                    kernels=kernels,
                    activation=Activation.SILU,
                    is_gated=True,
                    up=kernels.pack_linear(self.up[number]),
                    down=kernels.pack_linear(self.down[number]),
                )
                for number in own
            ),
            first_id=own.start,
            count=self.spec.count,
        )

    def loop(self, x: torch.Tensor) -> torch.Tensor:
        """A row after the other, an expert after the other."""
        found = torch.zeros_like(x)
        for row, total in zip(x, found, strict=True):
            shares = (self.gate @ row).softmax(-1)
            chosen = sorted(range(self.spec.count), key=lambda number: -shares[number])[: self.spec.per_token]
            whole = shares[chosen].sum() if self.spec.is_renormalized else 1.0
            for number in sorted(chosen):
                gate, up = (self.up[number] @ row).chunk(2)
                total += self.down[number] @ (F.silu(gate) * up) * shares[number] / whole
        return found


def rows(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn((count, HIDDEN), generator=torch.Generator().manual_seed(count)).to(dtype)


def spec(count: int, per_token: int, *, is_renormalized: bool = True) -> ExpertsSpec:
    return ExpertsSpec(
        count=count, per_token=per_token, intermediate_size=INNER, is_renormalized=is_renormalized
    )


@pytest.mark.parametrize(("count", "per_token"), [(1, 1), (5, 2), (8, 3), (4, 4)])
@pytest.mark.parametrize("is_renormalized", [True, False])
def test_it_is_the_loop_over_rows(count: int, per_token: int, is_renormalized: bool) -> None:
    weights = Weights(spec(count, per_token, is_renormalized=is_renormalized))
    x = rows(23)
    torch.testing.assert_close(
        add_slots(weights.mlp(TorchKernels())(x)), weights.loop(x), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7])
def test_ranks_together_have_the_bits_of_one(size: int) -> None:
    """Five experts: of seven ranks two have none."""
    weights, x = Weights(spec(5, 2)), rows(17)
    parts = [weights.mlp(TorchKernels(), rank, size)(x) for rank in range(size)]
    filled = torch.stack([(part != 0).any(-1) for part in parts])
    assert torch.equal(filled.sum(0), torch.ones(17, 2, dtype=torch.int64))
    whole = add_slots(weights.mlp(TorchKernels())(x))
    for order in (parts, parts[::-1]):
        assert torch.equal(add_slots(sum(order[1:], order[0])), whole)


@pytest.mark.parametrize("kernels", PACKED)
def test_neighbours_change_no_bits_of_a_row(kernels: str) -> None:
    native = CpuKernels(build(kernels), torch.bfloat16)
    mlp = Weights(spec(5, 2), torch.bfloat16).mlp(native)
    x = rows(40, torch.bfloat16)
    together = add_slots(mlp(x))
    assert together.dtype == torch.bfloat16
    assert torch.equal(torch.cat([add_slots(mlp(row)) for row in x.split(1)]), together)
    assert torch.equal(add_slots(mlp(x.flip(0))).flip(0), together)


def test_the_first_of_equal_experts_are_chosen() -> None:
    weights = Weights(spec(6, 2))
    weights.gate.zero_()
    ids, shares = weights.mlp(TorchKernels()).router(rows(3))
    assert ids.tolist() == [[0, 1]] * 3 and shares.tolist() == [[0.5, 0.5]] * 3


def test_no_rows() -> None:
    assert add_slots(Weights(spec(5, 2)).mlp(TorchKernels())(rows(0))).shape == (0, HIDDEN)
