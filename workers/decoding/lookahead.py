"""Guesses from what the model said to earlier guesses (parallel decoding).

A step that checks wrong guesses still says what the model would write after each of them. Taken as the next
guesses for the same places, that is Jacobi iteration on the sequence (Santilli et al., "Accelerating
Transformer Inference for Translation via Parallel Decoding", 2023). Kept as short n-grams, it is a picture of
how the model goes on after some tokens (the n-gram pool of Fu et al., "Break the Sequential Dependency of LLM
Inference Using Lookahead Decoding", 2024), which this class prefers where it has one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

MAX_KEPT = 4096  # n-grams of one sequence; those that were learnt first go first


class Lookahead:
    """Of one sequence; `workers.decoding.drafter.Drafter`."""

    def __init__(self) -> None:
        self._num_tokens = 0
        self._last: tuple[int, ...] = ()  # the two newest tokens
        self._after: OrderedDict[tuple[int, ...], int] = OrderedDict()  # one or two tokens: what came next
        self._iterated: Sequence[int] = ()  # said for the places after the newest token

    @property
    def num_tokens(self) -> int:
        """Tokens that it has been told."""
        return self._num_tokens

    def extend(self, token_ids: Sequence[int]) -> None:
        """The sequence goes on with these, which are surer than anything that was said to a guess."""
        self._num_tokens += len(token_ids)
        for token_id in token_ids:
            self._learn(self._last, token_id)
            self._last = (*self._last[-1:], token_id)

    def propose(self, max_tokens: int) -> tuple[int, ...]:
        """For each place what came after the same tokens, else what the model said there last, else the
        token before it once more: an iteration has to begin with something."""
        guesses: list[int] = []
        last = self._last
        for place in range(max_tokens if last else 0):
            guess = self._after.get(last, self._after.get(last[-1:]))
            if guess is None:
                guess = self._iterated[place] if place < len(self._iterated) else last[-1]
            guesses.append(guess)
            last = (*last[-1:], guess)
        return tuple(guesses)

    def note_checked(self, drafts: Sequence[int], sampled: Sequence[int]) -> None:
        """Remembers what was said after each guess."""
        given = (*self._last[-1:], *drafts)
        for place in range(1, len(sampled)):
            self._learn(tuple(given[place - 1 : place + 1]), sampled[place])
        num_right = next((i for i, draft in enumerate(drafts) if draft != sampled[i]), len(drafts))
        self._iterated = tuple(sampled[num_right + 1 :])

    def _learn(self, before: tuple[int, ...], token_id: int) -> None:
        for gram in {before, before[-1:]}:
            if gram:
                self._after[gram] = token_id
                self._after.move_to_end(gram)
        while len(self._after) > MAX_KEPT:
            self._after.popitem(last=False)
