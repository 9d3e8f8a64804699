"""Beam search: the most likely continuations as a whole, not token by token.

    hypotheses   up to `width` that go on, best first; all of one length
    finished     up to `width` that have ended, best first, by score / length ** length_penalty

A step takes the candidates to follow each hypothesis. Of all candidates together, the best `width` may end a
hypothesis, and the best `width` that end none are the hypotheses of the next step. More than that are needed
only because some end: `num_candidates` of a hypothesis are always enough.

The rules and the scores are those of transformers' `_beam_search` (5.24), on the number of new tokens;
early stopping says when to end with `width` finished ones: at once, when the best hypothesis at its length
now cannot beat the worst of them, or (NEVER) not at the length that suits it best. A search of width 1 ends
at once: it is greedy, as there. The method: Lowerre, "The Harpy Speech Recognition System" (1976); the length
penalty: Wu et al. (2016).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from workers.types import BeamParams, EarlyStopping, TokenLogprob


class Candidate(NamedTuple):
    """A token that may follow a hypothesis."""

    token_id: int
    score: float  # log-probability after penalties and bias; finite
    logprob: TokenLogprob | None = None  # of the model itself, when asked for


class Hypothesis(NamedTuple):
    """New tokens of one continuation."""

    token_ids: tuple[int, ...]
    score: float  # sum of its tokens' scores; of a finished one over its length ** length_penalty
    logprobs: tuple[TokenLogprob, ...] = ()  # of its tokens, when asked for


class BeamSearch:
    """Of one prompt. Knows tokens and scores, nothing of blocks."""

    def __init__(self, params: BeamParams, *, max_tokens: int, end_ids: Collection[int]) -> None:
        self._params = params
        self._max_tokens = max_tokens
        self._end_ids = frozenset(end_ids)
        self._running = [Hypothesis((), 0.0)]
        self._finished: list[Hypothesis] = []
        self._is_over = False

    @property
    def hypotheses(self) -> Sequence[Hypothesis]:
        """Those that go on; before the first step the empty one."""
        return self._running

    @property
    def finished(self) -> Sequence[Hypothesis]:
        """Those that have ended, best first. Their last token ended them, or the length did."""
        return self._finished

    @property
    def is_over(self) -> bool:
        """No step is wanted any more."""
        return self._is_over

    @property
    def num_candidates(self) -> int:
        """That a step needs of each hypothesis at most: no more than the end ids among them are passed
        over."""
        return self._params.width + len(self._end_ids)

    def advance(self, candidates: Sequence[Sequence[Candidate]]) -> tuple[int, ...]:
        """Takes the candidates of each hypothesis, best first. Returns the parent of each new hypothesis, as
        its place among those before; the new token is the last one of its own. () when the search is over."""
        assert not self._is_over, "a step after the end"
        assert len(candidates) == len(self._running), (
            f"candidates of {len(candidates)}, {len(self._running)} run"
        )
        width, num_tokens = self._params.width, len(self._running[0].token_ids) + 1
        ranked = sorted(
            (
                (before.score + candidate.score, -parent, -rank)
                for parent, (before, found) in enumerate(zip(self._running, candidates, strict=True))
                for rank, candidate in enumerate(found)
            ),
            reverse=True,
        )
        is_last = num_tokens == self._max_tokens
        going_on: list[Hypothesis] = []
        parents: list[int] = []
        for place, (score, minus_parent, minus_rank) in enumerate(ranked):
            before, candidate = self._running[-minus_parent], candidates[-minus_parent][-minus_rank]
            if is_last or candidate.token_id in self._end_ids:
                if place < width:
                    self._finished.append(_after(before, candidate, score / self._penalty(num_tokens)))
            elif len(going_on) < width:
                going_on.append(_after(before, candidate, score))
                parents.append(-minus_parent)
            if place + 1 >= width and (is_last or len(going_on) == width):
                break
        self._finished.sort(key=lambda hypothesis: -hypothesis.score)  # stable: of equals the older
        del self._finished[width:]
        self._running = going_on
        self._is_over = not going_on or self._is_settled(num_tokens)
        if self._is_over:
            self._running = []
            return ()
        return tuple(parents)

    def _is_settled(self, num_tokens: int) -> bool:
        """Nothing that goes on is expected to be better than what has ended."""
        if len(self._finished) < self._params.width:
            return False
        stopping = self._params.early_stopping
        if stopping is EarlyStopping.YES or self._params.width == 1:
            return True
        is_longest_best = stopping is EarlyStopping.NEVER and self._params.length_penalty > 0.0
        length = self._max_tokens if is_longest_best else num_tokens
        return self._running[0].score / self._penalty(length) <= self._finished[-1].score

    def _penalty(self, num_tokens: int) -> float:
        return float(num_tokens**self._params.length_penalty)


def _after(before: Hypothesis, candidate: Candidate, score: float) -> Hypothesis:
    logprobs = before.logprobs if candidate.logprob is None else (*before.logprobs, candidate.logprob)
    return Hypothesis((*before.token_ids, candidate.token_id), score, logprobs)
