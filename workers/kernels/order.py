"""In which order a product adds up its inputs, so that its bits do not depend on who has which part of them.

Floating-point sums depend on their order. A row-parallel product, whose inputs lie on several ranks, cuts
them into *leaves* that are the same for every number of ranks. The inputs of a leaf are added one after the
other, and the sums of leaves in one fixed binary tree, in float32, rounded once at its root (the idea of
TBIK, arXiv 2511.17826). A rank holds whole leaves. It adds what lies under a node of which it holds
every leaf; such nodes, few a rank, go to all ranks, and each joins them as the tree says.

A tree is written in postfix form: after leaf i the last two of the sums so far are joined `joins[i]` times.
`cpu/order.h` reads the same numbers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_long
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import gcd


@dataclass(frozen=True, slots=True)
class SumOrder:
    """The leaves of a whole matrix or of a rank's part of it, and how their sums are joined.

    What is left after the last leaf are the *nodes*: of a whole matrix one, of a part one or several.
    """

    widths: tuple[int, ...]  # inputs of each leaf
    joins: tuple[int, ...]
    grain: int  # divides every width of the whole matrix

    @property
    def num_inputs(self) -> int:
        return sum(self.widths)

    @property
    def spans(self) -> list[range]:
        """The inputs of each leaf, counted from the first one here."""
        ends = [0, *accumulate(self.widths)]
        return [range(start, end) for start, end in pairwise(ends)]

    @property
    def num_nodes(self) -> int:
        return len(self.joins) - sum(self.joins)


@dataclass(frozen=True, slots=True)
class NodeOrder:
    """How the nodes of all ranks, in the order of the ranks, are joined to one; in the same form."""

    counts: tuple[int, ...]  # nodes of each rank
    joins: tuple[int, ...]  # after each node


def one_leaf(width: int) -> SumOrder:
    """All inputs one after the other."""
    return SumOrder((width,), (0,), width)


def balanced(parts: Sequence[SumOrder]) -> SumOrder:
    """The parts, each of one node, joined by halves; the first half is never the smaller one."""
    if len(parts) == 1:
        return parts[0]
    half = (len(parts) + 1) // 2
    left, right = balanced(parts[:half]), balanced(parts[half:])
    joins = (*left.joins, *right.joins[:-1], right.joins[-1] + 1)
    return SumOrder(left.widths + right.widths, joins, gcd(left.grain, right.grain))


def divide(whole: SumOrder, leaves: Sequence[range]) -> tuple[list[SumOrder], NodeOrder]:
    """The part of every rank, which holds these leaves of `whole`, and how their nodes are joined."""
    own_joins, later_joins = [0] * len(whole.widths), [0] * len(whole.widths)
    first_leaves: list[int] = []  # of each sum in the list
    rank_start = {leaf: part.start for part in leaves for leaf in part}
    for leaf, joins in enumerate(whole.joins):
        first_leaves.append(leaf)
        for _ in range(joins):
            first_leaves.pop()
            is_own = first_leaves[-1] >= rank_start[leaf]
            (own_joins if is_own else later_joins)[leaf] += 1
    parts, counts, node_joins = [], [], []
    for part in leaves:
        span = slice(part.start, part.stop)
        ends: list[int] = []  # the last leaf of each node
        for leaf in part:
            del ends[len(ends) - own_joins[leaf] :]
            ends.append(leaf)
        parts.append(SumOrder(whole.widths[span], tuple(own_joins[span]), whole.grain))
        counts.append(len(ends))
        node_joins += [later_joins[leaf] for leaf in ends]
    return parts, NodeOrder(tuple(counts), tuple(node_joins))


class Leaf(ctypes.Structure):
    """As in cpu/order.h."""

    _fields_ = [("inputs", c_long), ("joins", c_long)]


class NativeNodeOrder(ctypes.Structure):
    """As NodeOrder in cpu/order.h."""

    _fields_ = [("counts", ctypes.POINTER(c_long)), ("joins", ctypes.POINTER(c_long))]


def native_leaves(order: SumOrder) -> ctypes.Array[Leaf]:
    """The leaves as C++ takes them."""
    leaves = [Leaf(*pair) for pair in zip(order.widths, order.joins, strict=True)]
    return (Leaf * len(leaves))(*leaves)


def native_nodes(order: NodeOrder) -> NativeNodeOrder:
    """Keeps the numbers that it points to."""
    counts, joins = (c_long * len(order.counts))(*order.counts), (c_long * len(order.joins))(*order.joins)
    return NativeNodeOrder(counts=counts, joins=joins)
