"""Several guesses for the same places: which of them to check together.

A tree of guesses holds, for each next place, some tokens that may come there; a token can be right only when
all before it on its way are. Of the trees of one size the one is taken whose tokens are likeliest (Cai et
al., "Medusa", 2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class GuessTree(NamedTuple):
    """Tokens, likeliest first, so that each comes after the one that it follows."""

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]  # of each token, which one it follows; -1: what is known


class GrowingTree:
    """Tokens that may come next, and those that may come after the likeliest of them, as they are found."""

    def __init__(self, num_tokens: int) -> None:
        """num_tokens: of the tree that is wanted."""
        self._num_tokens = num_tokens
        self._token_ids: list[int] = []
        self._parents: list[int] = []
        self._scores: list[float] = []  # log-probability of a token and of all that it follows
        self._last = -1  # the token that the next ones follow; -1: what is known

    def grow(self, tokens: Sequence[tuple[int, float]]) -> None:
        """tokens: that may come after the best one of those before, or after what is known, with the
        logarithm of how likely each is, best first."""
        last = self._last
        before = 0.0 if last < 0 else self._scores[last]
        self._last = len(self._token_ids)
        for token_id, score in tokens:
            self._add(last, token_id, before + score)

    def add_chain(self, token_ids: Sequence[int], score: float) -> None:
        """Tokens that may come one after the other, each with this logarithm of how likely it is when those
        before it come. What is in the tree already is as likely as it seems at best."""
        last, total = -1, 0.0
        for token_id in token_ids:
            total += score
            known = (
                number
                for number, parent in enumerate(self._parents)
                if parent == last and self._token_ids[number] == token_id
            )
            number = next(known, None)
            if number is None:
                number = len(self._token_ids)
                self._add(last, token_id, total)
            else:
                self._scores[number] = max(self._scores[number], total)
            last = number

    def _add(self, parent: int, token_id: int, score: float) -> None:
        self._token_ids.append(token_id)
        self._parents.append(parent)
        self._scores.append(score)

    def likeliest(self, least: float) -> GuessTree:
        """The likeliest `num_tokens` of them, and the first, but none that is less likely than `least`."""
        # What a token follows comes before it, as it is likelier, or as likely and older.
        order = sorted(range(len(self._scores)), key=lambda number: (-self._scores[number], number))
        kept = [number for number in order[: self._num_tokens] if self._scores[number] >= least]
        kept = kept or order[: min(1, self._num_tokens)]
        places = {number: place for place, number in enumerate(kept)} | {-1: -1}
        return GuessTree(
            tuple(self._token_ids[number] for number in kept),
            tuple(places[self._parents[number]] for number in kept),
        )


def depth_of(parents: Sequence[int]) -> int:
    """Tokens on the longest way of a tree."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return max(depths, default=0)
