"""Tensor parallelism: the collectives that put the parts of the ranks together.

The scheme is Megatron's (Shoeybi et al. 2019): a column-parallel linear (outputs split), a row-parallel one
(inputs split) and one all-reduce, twice a layer, or once where attention and MLP run side by side; embedding
and head are split along the vocabulary.

On a CPU the sums are made in an order that does not depend on the number of ranks, so that groups of up to
eight give the same bits. On GPUs the order is that of the ranks, of which `workers.kernels.symmetric` has
more, or NCCL's, which goes by the length of a message.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from workers.kernels import (
    KeptRows,
    NodeOrder,
    PackedLinear,
    PartLinear,
    SharedCollective,
    SymmetricCollective,
)


class Nodes(NamedTuple):
    """A rank's part of a row-parallel product whose sum has one order: see `workers.kernels.order`."""

    sums: torch.Tensor  # (nodes of this rank, T, out) float32
    order: NodeOrder
    bias: torch.Tensor | None  # (out,) float32, added once the sum is whole
    out_dtype: torch.dtype  # to which it is rounded then


Part = torch.Tensor | Nodes  # what a rank has of a sum over ranks; a tensor (T, out) is added rank by rank


class OrderedLinear:
    """A rank's part of a row-parallel layer that gives Nodes."""

    def __init__(
        self, linear: PartLinear, order: NodeOrder, bias: torch.Tensor | None, out_dtype: torch.dtype
    ) -> None:
        """bias (out,): every rank has it."""
        self.linear, self.order = linear, order
        self.bias = None if bias is None else bias.float()
        self._out_dtype = out_dtype

    def __call__(self, x: torch.Tensor) -> Nodes:
        """x (T, inputs of this rank)."""
        return Nodes(self.linear.nodes(x), self.order, self.bias, self._out_dtype)


RowParallel = PackedLinear | OrderedLinear  # gives a Part


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """This rank's place in its group. With size 1 every method is a no-op.

    Collectives have a timeout of their own, but for sums in symmetric memory and what a CUDA graph replays:
    there rank 0's watchdog ends the group. A dead peer surfaces as a RuntimeError.
    """

    rank: int = 0
    size: int = 1
    shared: SharedCollective | None = None  # None with size > 1: torch's default group
    symmetric: SymmetricCollective | None = None  # of GPUs, for some sums; the rest is the default group's
    is_recordable: bool = True  # collectives wait for nothing on the host: a CUDA graph can hold them

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over all ranks, in place; x must be contiguous."""
        if self.shared is not None:
            self.shared.all_reduce(x)
        elif self.symmetric is not None and self.symmetric.is_for(x):
            self.symmetric.all_reduce(x)
        elif self.size > 1:
            dist.all_reduce(x)
        return x

    def share(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's x on all ranks, in place; x must be contiguous."""
        if self.size > 1:
            dist.broadcast(x, src=0)
        return x

    def add_up(self, *parts: Part) -> torch.Tensor:
        """The sum over all ranks, and over several parts of each: (T, out), equal on all ranks."""
        tensors = [part for part in parts if isinstance(part, torch.Tensor)]
        if len(tensors) == len(parts):  # one sum over the ranks will do
            return self.all_reduce(sum(tensors[1:], tensors[0]))
        joined = [
            self.all_reduce(part) if isinstance(part, torch.Tensor) else self._join(part) for part in parts
        ]
        return sum(joined[1:], joined[0])

    def _join(self, part: Nodes) -> torch.Tensor:
        """torch's own sum would do as each of its algorithms likes: it only carries the nodes, padded to the
        most that a rank has."""
        sums, order, bias, out_dtype = part
        if self.shared is not None:
            return self.shared.join(sums, order, bias, out_dtype)
        most = max(order.counts)
        padded = F.pad(sums, (0, 0, 0, 0, 0, most - len(sums))).contiguous()
        gathered = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(gathered, padded)
        every = [node for some, count in zip(gathered, order.counts, strict=True) for node in some[:count]]
        found: list[torch.Tensor] = []
        for total, joins in zip(every, order.joins, strict=True):
            for _ in range(joins):
                total = found.pop() + total
            found.append(total)
        (total,) = found
        return (total if bias is None else total + bias).to(out_dtype)

    def gather_columns(self, x: torch.Tensor, widths: tuple[int, ...], kept: KeptRows) -> torch.Tensor | None:
        """x (rows, widths[rank]) of every rank side by side on rank 0: (rows, sum of widths); None elsewhere.

        kept: where the result may lie, valid until the next call.

        torch wants equal shapes, so there parts travel padded to the widest and are cut on arrival: a padding
        column is never seen by anyone.
        """
        if self.size == 1:
            return x
        if self.shared is not None:
            into = kept.take(x.shape[0]).values if self.rank == 0 else None
            return self.shared.gather_columns(x, widths, into)
        widest = max(widths)
        padded = F.pad(x, (0, widest - x.shape[1])).contiguous()
        if not self.is_recordable:
            padded = padded.cpu()  # gloo gathers there alone
        if self.rank != 0:
            dist.gather(padded, None, dst=0)
            return None
        parts = [torch.empty_like(padded) for _ in widths]
        dist.gather(padded, parts, dst=0)
        whole = torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1)
        return whole.to(x.device)


class VocabParallelEmbedding:
    """Holds the embedding rows `vocab` of the whole vocabulary."""

    def __init__(self, weight: torch.Tensor, vocab: range, parallel: TensorParallel) -> None:
        self._weight = weight  # (len(vocab), hidden)
        self._vocab = vocab
        self._parallel = parallel

    @property
    def weight(self) -> torch.Tensor:
        """The part of this rank, (ids, hidden), beginning with `first_id`."""
        return self._weight

    @property
    def first_id(self) -> int:
        return self._vocab.start

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids (T,) -> (T, hidden), equal on all ranks."""
        if self._parallel.size == 1:
            return F.embedding(token_ids, self._weight)
        elsewhere = (token_ids < self._vocab.start) | (token_ids >= self._vocab.stop)
        local = (token_ids - self._vocab.start).masked_fill(elsewhere, 0)
        rows = F.embedding(local, self._weight).masked_fill(elsewhere[:, None], 0)
        # Each token's row is on one rank only; the sum hands it to all.
        return self._parallel.all_reduce(rows)


class VocabParallelHead:
    """Holds the output rows of some of the vocabulary."""

    def __init__(self, linear: PackedLinear, widths: tuple[int, ...], parallel: TensorParallel) -> None:
        """`linear` yields float32; `widths`: vocabulary rows of every rank."""
        self._linear = linear
        self._widths = widths
        self._parallel = parallel
        self._kept = KeptRows(sum(widths))

    @property
    def widths(self) -> tuple[int, ...]:
        """Columns of every rank."""
        return self._widths

    @property
    def linear(self) -> PackedLinear:
        """The part of this rank, without the collective."""
        return self._linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor | None:
        """x (R, hidden) -> logits (R, vocabulary) float32 on rank 0, valid until the next; None elsewhere."""
        return self.gather(self._linear(x))

    def gather(self, logits: torch.Tensor) -> torch.Tensor | None:
        """logits (R, vocabulary of this rank) -> (R, vocabulary) on rank 0, None elsewhere."""
        return self._parallel.gather_columns(logits, self._widths, self._kept)
