"""How likely guesses are to be right, from what became of those before them."""

from __future__ import annotations

from collections.abc import Iterable

_FADE = 0.9  # of what is known of a sequence's guesses, per check
_PRIOR_CHECKS = 2.0  # that the chance of all sequences weighs in the one of a sequence
_FIRST_CHANCE = 0.5
_TREE_FADE = 0.98  # of what is known of the guesses of trees, per tree of any sequence


class Chance:
    """How likely a guess is to be right, given that those before it were: faded counts over a prior."""

    def __init__(self, prior: Chance | None = None) -> None:
        """`prior`: of all sequences together; it learns along."""
        self._prior = prior
        self._right = self._wrong = 0.0

    @property
    def value(self) -> float:
        """From 0 to 1."""
        first = _FIRST_CHANCE if self._prior is None else self._prior.value
        return (self._right + _PRIOR_CHECKS * first) / (self._right + self._wrong + _PRIOR_CHECKS)

    def observe(self, num_drafts: int, num_right: int) -> None:
        """Of `num_drafts` guesses the first `num_right` were right; the one after them, if any, was not."""
        self._right = self._right * _FADE + num_right
        self._wrong = self._wrong * _FADE + (num_right < num_drafts)
        if self._prior is not None:
            self._prior.observe(num_drafts, num_right)


class TreeChances:
    """How likely each guess of a tree is to be right, by its number in the tree, likeliest first."""

    def __init__(self) -> None:
        self._right: list[float] = []
        self._seen: list[float] = []

    @property
    def num_seen(self) -> float:
        """Trees, the newer the more they count."""
        return self._seen[0] if self._seen else 0.0

    def observe(self, num_guesses: int, right: Iterable[int]) -> None:
        """A tree of so many guesses was checked, and these came true."""
        missing = num_guesses - len(self._seen)
        self._seen += [0.0] * missing
        self._right += [0.0] * missing
        for number in range(num_guesses):
            self._seen[number] = self._seen[number] * _TREE_FADE + 1.0
            self._right[number] *= _TREE_FADE
        for number in right:
            self._right[number] += 1.0

    def values(self, num_guesses: int) -> list[float]:
        """From 0 to 1. What was never tried is somewhat less likely than the one before it."""
        found: list[float] = []
        for number in range(num_guesses):
            first = (found[-1] if found else 1.0) * _FIRST_CHANCE
            right, seen = (
                (self._right[number], self._seen[number]) if number < len(self._seen) else (0.0, 0.0)
            )
            found.append((right + _PRIOR_CHECKS * first) / (seen + _PRIOR_CHECKS))
        return found
