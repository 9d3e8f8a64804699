"""The mixture of experts against a loop over rows, whole and in the parts of several ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tests.unit.kernels.builds import PACKED, build
from workers.kernels import Kernels, TorchKernels, one_leaf
from workers.kernels.native import CpuKernels
from workers.model.architecture import Activation, ExpertsSpec
from workers.model.experts import ExpertMlp, Router
from workers.model.mlp import DenseMlp
from workers.model.orders import order_of_experts
from workers.model.parallel import Nodes

HIDDEN, INNER = 32, 24


class Weights:
    """Of one layer, drawn at random."""

    def __init__(self, spec: ExpertsSpec, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(3)

        def draw(*shape: int) -> torch.Tensor:
            return (torch.randn(shape, generator=generator) * shape[-1] ** -0.5).to(dtype)

        self.spec = spec
        self.gate = draw(spec.num_experts, HIDDEN)
        self.up = draw(spec.num_experts, 2 * INNER, HIDDEN)
        self.down = draw(spec.num_experts, HIDDEN, INNER)

    def mlp(self, kernels: Kernels, rank: int = 0, size: int = 1) -> ExpertMlp:
        own, order = self.spec.of_rank(rank, size), order_of_experts(self.spec.num_experts, rank, size)
        return ExpertMlp(
            router=Router(
                gate=kernels.pack_linear(self.gate, None, torch.float32),
                num_per_token=self.spec.num_per_token,
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
            num_experts=self.spec.num_experts,
            order=order.part,
            nodes=order.nodes if size > 1 else None,
        )

    def loop(self, x: torch.Tensor) -> torch.Tensor:
        """A row after the other, an expert after the other."""
        found = torch.zeros_like(x)
        for row, total in zip(x, found, strict=True):
            shares = (self.gate @ row).softmax(-1)
            best_first = sorted(range(self.spec.num_experts), key=lambda number: -shares[number])
            chosen = best_first[: self.spec.num_per_token]
            whole = shares[chosen].sum() if self.spec.is_renormalized else 1.0
            for number in sorted(chosen):
                gate, up = (self.up[number] @ row).chunk(2)
                total += self.down[number] @ (F.silu(gate) * up) * shares[number] / whole
        return found


def whole(mlp: ExpertMlp, x: torch.Tensor) -> torch.Tensor:
    """What a group of one rank says."""
    found = mlp(x)
    assert isinstance(found, torch.Tensor)
    return found


def rows(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn((count, HIDDEN), generator=torch.Generator().manual_seed(count)).to(dtype)


def spec(count: int, per_token: int, *, is_renormalized: bool = True) -> ExpertsSpec:
    return ExpertsSpec(
        layers=(0,),
        num_experts=count,
        num_per_token=per_token,
        intermediate_size=INNER,
        is_renormalized=is_renormalized,
    )


@pytest.mark.parametrize(("count", "per_token"), [(1, 1), (5, 2), (8, 3), (4, 4)])
@pytest.mark.parametrize("is_renormalized", [True, False])
def test_it_is_the_loop_over_rows(count: int, per_token: int, is_renormalized: bool) -> None:
    weights = Weights(spec(count, per_token, is_renormalized=is_renormalized))
    x = rows(23)
    torch.testing.assert_close(whole(weights.mlp(TorchKernels()), x), weights.loop(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("count", "per_token"), [(5, 2), (8, 4), (60, 6)])
@pytest.mark.parametrize("size", [2, 3, 4, 7, 8])
def test_ranks_together_have_the_bits_of_one(count: int, per_token: int, size: int) -> None:
    """Of eight ranks three have none of five experts; most send one or two sums."""
    weights, x = Weights(spec(count, per_token)), rows(17)
    sums: list[torch.Tensor] = []
    for rank in range(size):
        part = weights.mlp(TorchKernels(), rank, size)(x)
        assert isinstance(part, Nodes) and len(part.sums) == part.order.counts[rank] <= 4
        sums += part.sums
    found: list[torch.Tensor] = []
    for total, joins in zip(sums, part.order.joins, strict=True):
        for _ in range(joins):
            total = found.pop() + total
        found.append(total)
    assert len(found) == 1 and torch.equal(found[0], whole(weights.mlp(TorchKernels()), x))


def test_parts_that_are_added_rank_by_rank() -> None:
    """As on GPUs."""
    weights, x = Weights(spec(5, 2)), rows(17)
    parts = [weights.mlp(TorchKernels(), rank, 3) for rank in range(3)]
    alone = [replace(part, order=one_leaf(len(part.experts)), nodes=None) for part in parts]
    total = sum((whole(part, x) for part in alone[1:]), whole(alone[0], x))
    torch.testing.assert_close(total, weights.loop(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("count", "size", "held"), [(128, 2, [64] * 2), (128, 8, [16] * 8), (8, 3, [3, 3, 2])]
)
def test_shares_of_experts_are_even(count: int, size: int, held: list[int]) -> None:
    assert [len(spec(count, 1).of_rank(rank, size)) for rank in range(size)] == held
    sent = order_of_experts(count, 0, size).nodes.counts
    assert max(sent) == (1 if size != 3 else 2)


@pytest.mark.parametrize("kernels", PACKED)
def test_neighbours_change_no_bits_of_a_row(kernels: str) -> None:
    native = CpuKernels(build(kernels), torch.bfloat16)
    mlp = Weights(spec(5, 2), torch.bfloat16).mlp(native)
    x = rows(40, torch.bfloat16)
    together = whole(mlp, x)
    assert together.dtype == torch.bfloat16
    assert torch.equal(torch.cat([whole(mlp, row) for row in x.split(1)]), together)
    assert torch.equal(whole(mlp, x.flip(0)).flip(0), together)


def test_the_first_of_equal_experts_are_chosen() -> None:
    weights = Weights(spec(6, 2))
    weights.gate.zero_()
    ids, shares = weights.mlp(TorchKernels()).router(rows(3))
    assert ids.tolist() == [[0, 1]] * 3 and shares.tolist() == [[0.5, 0.5]] * 3


def test_no_rows() -> None:
    assert whole(Weights(spec(5, 2)).mlp(TorchKernels()), rows(0)).shape == (0, HIDDEN)
