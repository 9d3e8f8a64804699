"""The orders in which a model's row-parallel products add up their inputs, whatever the size of the group.

Ranks of groups of every size that adds up so hold whole leaves: neighbouring query heads for the attention
output, joined first within their KV head; `ModelSpec.inner_leaves` for the down projection; neighbouring
experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from workers.kernels import NodeOrder, SumOrder, balanced, divide, one_leaf
from workers.model.architecture import ModelSpec
from workers.model.shares import expert_cuts, queries_per_leaf, share


@dataclass(frozen=True, slots=True)
class RankOrder:
    """Of one matrix on one rank."""

    part: SumOrder  # the inputs of this rank
    nodes: NodeOrder  # of all ranks


@dataclass(frozen=True, slots=True)
class RankOrders:
    """Of both row-parallel matrices of a layer."""

    output: RankOrder
    down: RankOrder


def orders_of_rank(spec: ModelSpec, rank: int, size: int) -> RankOrders | None:
    """The part of `rank` in a group of `size` ranks; None: it adds up in an order of its own."""
    if not spec.adds_as_one_rank(size):
        return None
    queries = queries_per_leaf(spec.num_heads, spec.num_kv_heads)
    of_kv_head = balanced([one_leaf(queries * spec.head_dim)] * (spec.queries_per_kv_head // queries))
    output = balanced([of_kv_head] * spec.num_kv_heads)
    heads = [spec.q_heads_of_rank(other, size) for other in range(size)]
    down = balanced([one_leaf(width) for width in spec.inner_leaves])
    return RankOrders(
        output=_of_rank(output, [range(span.start // queries, span.stop // queries) for span in heads], rank),
        down=_of_rank(down, [share(len(spec.inner_leaves), other, size) for other in range(size)], rank),
    )


def order_of_experts(count: int, rank: int, size: int) -> RankOrder:
    """In which what `count` experts give a row is added up; a leaf is as wide as it has experts."""
    widths = [stop - start for start, stop in pairwise(expert_cuts(count))]
    whole = balanced([one_leaf(width) for width in widths])
    return _of_rank(whole, [share(len(widths), other, size) for other in range(size)], rank)


def _of_rank(whole: SumOrder, leaves: list[range], rank: int) -> RankOrder:
    parts, nodes = divide(whole, leaves)
    return RankOrder(parts[rank], nodes)
