"""Guesses from the tokens of each sequence alone."""

from __future__ import annotations

from collections.abc import Sequence as Sequences

from workers.decoding.drafter import Drafter, drafter_of
from workers.engine.proposals import Proposals
from workers.engine.sequence import Sequence


class TextGuesses:
    """Of one engine; `workers.engine.drafting.Guesses`."""

    def __init__(self, method: str) -> None:
        """Raises ValueError for a method that there is not."""
        drafter_of(method)
        self._method = method
        self._found: list[tuple[int, ...]] = []

    def limits(self, sequences: Sequences[Sequence], most: Sequences[int]) -> list[int]:
        """As many as are found."""
        self._found = [self._propose(*pair) for pair in zip(sequences, most, strict=True)]
        return list(map(len, self._found))

    def unread(self, sequences: Sequences[Sequence]) -> None:
        """Nothing is: tokens are looked at as they come."""

    def guess(self, sequences: Sequences[Sequence], lengths: Sequences[int]) -> Proposals:
        return Proposals([found[:length] for found, length in zip(self._found, lengths, strict=True)])

    def note_checked(self, sequence: Sequence, sampled: Sequences[int]) -> None:
        self._drafter(sequence).note_checked(sequence.drafts[: len(sampled) - 1], sampled)

    def _propose(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        drafter = self._drafter(sequence)
        drafter.extend(sequence.tokens(drafter.num_tokens, sequence.num_tokens))
        return sequence.allowed(drafter.propose(most))

    def _drafter(self, sequence: Sequence) -> Drafter:
        if sequence.drafter is None:
            sequence.drafter = drafter_of(self._method)
        return sequence.drafter
