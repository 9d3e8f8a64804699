"""Guesses from the text itself: what came after the same few tokens before (prompt lookup decoding).

Source: Saxena, "Prompt Lookup Decoding" (2023); the same as n-gram speculation elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence

LONGEST_GRAM = 4
SHORTEST_GRAM = 2


class PromptLookup:
    """Finds the last tokens of a sequence again in what came before them; `workers.decoding.drafter.Drafter`.

    Every n-gram of SHORTEST_GRAM .. LONGEST_GRAM tokens is kept with the place after its newest occurrence:
    a token costs a few dictionary entries and a guess a few look-ups, however long the sequence is.
    """

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # n-gram: position after it

    @property
    def num_tokens(self) -> int:
        """Tokens that it has been told."""
        return len(self._tokens)

    def extend(self, token_ids: Sequence[int]) -> None:
        """The sequence goes on with these. An n-gram becomes known with the token after it."""
        tokens, after = self._tokens, self._after
        for token_id in token_ids:
            end = len(tokens)
            for size in range(SHORTEST_GRAM, min(LONGEST_GRAM, end) + 1):
                after[tuple(tokens[end - size : end])] = end
            tokens.append(token_id)

    def propose(self, max_tokens: int) -> tuple[int, ...]:
        """Up to `max_tokens` that followed the longest n-gram that the sequence ends with; () if it is new.

        When the newest occurrence overlaps the end, what follows repeats with that distance.
        """
        tokens, end = self._tokens, len(self._tokens)
        for size in range(min(LONGEST_GRAM, end), SHORTEST_GRAM - 1, -1):
            start = self._after.get(tuple(tokens[end - size :]))
            if start is not None:
                period = end - start
                return tuple(tokens[start + index % period] for index in range(max_tokens))
        return ()

    def note_checked(self, drafts: Sequence[int], sampled: Sequence[int]) -> None:
        """What the model says to wrong guesses is not part of the text."""
