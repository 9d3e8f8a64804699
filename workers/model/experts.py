"""A mixture of experts in place of an MLP: every row goes through a few of many.

Ranks hold whole experts, neighbours of each other. What a row gets of its experts is added up in the order of
`workers.kernels.order`: leaves of neighbouring experts, in each of them by rising expert, then the leaves in
one tree, in float32. An expert that a row does not go through adds an exact 0. So neither the size of the
group nor the other rows of a step change the bits of a row, and a rank sends the few sums that it has whole,
mostly one, however many experts a row has.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from workers.kernels import NodeOrder, PackedLinear, SumOrder
from workers.model.mlp import DenseMlp
from workers.model.parallel import Nodes, Part


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """Which experts a row goes through; whole on every rank."""

    gate: PackedLinear  # hidden -> experts, float32
    num_per_token: int
    is_renormalized: bool  # the shares of the chosen experts add up to 1

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x (T, hidden) -> ids (T, num_per_token), rising in each row, and their shares, float32.

        Of experts with equal shares the first ones are taken.
        """
        shares, ids = self.gate(x).softmax(-1).sort(dim=-1, descending=True, stable=True)
        shares, ids = shares[:, : self.num_per_token], ids[:, : self.num_per_token]
        if self.is_renormalized:
            shares = shares / _sum_in_order(shares)[:, None]
        ids, order = ids.sort(dim=-1)
        return ids, shares.gather(1, order)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertMlp:
    """Some of the experts, on one rank. Waits for the device: the host must know how many rows each has."""

    router: Router
    experts: tuple[DenseMlp, ...]  # each of them whole
    first_id: int  # of those
    num_experts: int  # of all ranks
    order: SumOrder  # of those of this rank
    nodes: NodeOrder | None  # of all ranks; None: this is the only one, or parts are added rank by rank

    def __call__(self, x: torch.Tensor) -> Part:
        """x (T, hidden), equal on all ranks -> what this rank has of the sums."""
        ids, shares = self.router(x)
        per_token, by_slot, share_of = ids.shape[1], ids.flatten(), shares.flatten()
        counts = torch.bincount(by_slot, minlength=self.num_experts).tolist()
        slots_of = torch.split_with_sizes(by_slot.argsort(stable=True), counts)[self.first_id :]
        sums: list[torch.Tensor] = []
        for leaf, joins in zip(self.order.spans, self.order.joins, strict=True):
            total = torch.zeros_like(x, dtype=torch.float32)
            for number in leaf:
                if len(slots := slots_of[number]):
                    rows = slots // per_token
                    found = self.experts[number](x[rows])
                    assert isinstance(found, torch.Tensor), "an expert is whole on its rank"
                    total.index_add_(0, rows, found * share_of[slots, None])
            for _ in range(joins):
                total = sums.pop() + total
            sums.append(total)
        if self.nodes is not None:
            own = torch.stack(sums) if sums else x.new_empty((0, *x.shape), dtype=torch.float32)
            return Nodes(own, self.nodes, None, x.dtype)
        return sum(sums[1:], sums[0]).to(x.dtype) if sums else torch.zeros_like(x)


def _sum_in_order(x: torch.Tensor) -> torch.Tensor:
    """Over the second axis, from its first element on: torch's own sum takes the order that it likes."""
    first, *others = x.unbind(1)
    return sum(others, first)
