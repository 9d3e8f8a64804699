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

    def grow(self, tokens: Sequence[tuple[int, float]], least: float) -> int | None:
        """tokens: that may come after the one that was returned last, or after what is known, with the
        logarithm of how likely each is, best first. Returns the best one, unless it is less likely than
        `least`, with all that it follows, or nothing behind it has room in the tree."""
        last = self._last
        before = 0.0 if last < 0 else self._scores[last]
        self._last = len(self._token_ids)
        for token_id, score in tokens:
            self._token_ids.append(token_id)
            self._parents.append(last)
            self._scores.append(before + score)
        best = self._scores[self._last]
        num_before = sum(score >= best for score in self._scores)  # itself among them
        return self._token_ids[self._last] if best >= least and num_before < self._num_tokens else None

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
