"""A mixture of experts in place of an MLP: every row goes through a few of many.

Ranks hold whole experts, neighbours of each other. A row and one of its experts are a *slot*. Only one rank
fills a slot and the others have zeros there, so the sum over the ranks is exact whatever its order; the slots
of a row are added afterwards, by rising expert, on every rank. So neither the size of the group nor the other
rows of a step change the bits of a row. It costs an all-reduce as many times as wide as a row has experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from workers.kernels import PackedLinear
from workers.model.mlp import DenseMlp


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """Which experts a row goes through; whole on every rank."""

    gate: PackedLinear  # hidden -> experts, float32
    per_token: int
    is_renormalized: bool  # the shares of the chosen experts add up to 1

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x (T, hidden) -> ids (T, per_token), rising in each row, and their shares, float32.

        Of experts with equal shares the first ones are taken.
        """
        shares, ids = self.gate(x).softmax(-1).sort(dim=-1, descending=True, stable=True)
        shares, ids = shares[:, : self.per_token], ids[:, : self.per_token]
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
    count: int  # of all ranks

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x (T, hidden), equal on all ranks -> the slots of this rank's experts, (T, per token, hidden)."""
        ids, shares = self.router(x)
        per_token = ids.shape[1]
        by_slot, share_of = ids.flatten(), shares.flatten()
        slots = x.new_zeros((len(by_slot), x.shape[1]))
        counts = torch.bincount(by_slot, minlength=self.count).tolist()
        by_expert = torch.split_with_sizes(by_slot.argsort(stable=True), counts)
        for expert, own in zip(self.experts, by_expert[self.first_id :], strict=False):
            if len(own):
                found = expert(x[own // per_token])
                assert isinstance(found, torch.Tensor), "an expert is whole on its rank"
                slots[own] = (found * share_of[own, None]).to(x.dtype)
        return slots.view(x.shape[0], per_token, x.shape[1])


def add_slots(mixed: torch.Tensor) -> torch.Tensor:
    """What an Mlp gave, summed over the ranks: of slots (T, per token, hidden) the sum of each row."""
    if mixed.dim() == 2:
        return mixed
    return _sum_in_order(mixed.float()).to(mixed.dtype)


def _sum_in_order(x: torch.Tensor) -> torch.Tensor:
    """Over the second axis, from its first element on: torch's own sum takes the order that it likes."""
    first, *others = x.unbind(1)
    return sum(others, first)
