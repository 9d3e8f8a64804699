"""Several guesses for the same places: which of them to check together.

A tree of guesses holds, for each next place, some tokens that may come there; a token can be right only when
all before it on its way are. Of the trees of one size the one is taken whose tokens are likeliest, as if what
comes at the places did not depend on each other (Cai et al., "Medusa", 2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple


class GuessTree(NamedTuple):
    """Tokens, likeliest first, so that each comes after the one that it follows."""

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]  # of each token, which one it follows; -1: what is known


def best_tree(levels: Sequence[Sequence[tuple[int, float]]], num_tokens: int) -> GuessTree:
    """levels: of each next place, tokens with their log-probabilities, best first. Up to `num_tokens`."""
    token_ids: list[int] = []
    parents: list[int] = []
    # (-score, number, parent, level, rank, score of the parent)
    heap: list[tuple[float, int, int, int, int, float]] = []
    number = 0

    def offer(parent: int, level: int, rank: int, before: float) -> None:
        nonlocal number
        if level < len(levels) and rank < len(levels[level]):
            heappush(heap, (-before - levels[level][rank][1], number, parent, level, rank, before))
            number += 1

    offer(-1, 0, 0, 0.0)
    while heap and len(token_ids) < num_tokens:
        minus_score, _, parent, level, rank, before = heappop(heap)
        token_ids.append(levels[level][rank][0])
        parents.append(parent)
        offer(len(token_ids) - 1, level + 1, 0, -minus_score)
        offer(parent, level, rank + 1, before)
    return GuessTree(tuple(token_ids), tuple(parents))


def depth_of(parents: Sequence[int]) -> int:
    """Tokens on the longest way of a tree."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return max(depths, default=0)
