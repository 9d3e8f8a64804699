"""What came after the same tokens before, and how likely it is to come again."""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from typing import NamedTuple

from workers.decoding.chances import Chance
from workers.decoding.prompt_lookup import PromptLookup


class Copied(NamedTuple):
    """Tokens that may come next, one after the other."""

    token_ids: tuple[int, ...] = ()
    score: float = 0.0  # log-probability of each, when those before it come


class Copies:
    """Of one sequence. Learns from what comes, whether its guesses were checked or not."""

    def __init__(self, prior: Chance) -> None:
        """prior: of all sequences together; it learns along."""
        self._lookup = PromptLookup()
        self._chance = Chance(prior)
        self._last: tuple[int, ...] = ()  # said to come after the tokens that are known

    @property
    def num_tokens(self) -> int:
        """Tokens of the sequence that it has been told."""
        return self._lookup.num_tokens

    def extend(self, token_ids: Sequence[int]) -> None:
        """The sequence goes on with these."""
        came = list(zip(self._last, token_ids, strict=False))
        if came:
            num_right = next((i for i, (said, token) in enumerate(came) if said != token), len(came))
            self._chance.observe(len(came), num_right)
        self._last = ()
        self._lookup.extend(token_ids)

    def propose(self, max_tokens: int) -> Copied:
        """Up to so many tokens."""
        self._last = self._lookup.propose(max_tokens)
        return Copied(self._last, log(self._chance.value))
