"""A compiled grammar and how far one answer has come in it.

Which tokens may come next: those that the grammar goes on with, and where it may end, the ids that end the
choice. `llguidance` lets other threads run while it finds them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from workers.engine.grammars import AnswerEnd, GrammarRefused
from workers.engine.step import GrammarFailed

# CPU time of the thread, so that a busy machine changes nothing: an answer's in all, and more by token.
_MAX_FIRST_S = 0.5
_MAX_TOKEN_S = 0.01

_Bits = npt.NDArray[np.uint8]


class LlguidanceGrammar:
    """Implements `workers.engine.grammars.CompiledGrammar`."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, first_s: float) -> None:
        """matcher: at the beginning, and good; `first_s` is what `check_first` took."""
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._first_s = first_s

    def begin(self, end: AnswerEnd, output: Sequence[int]) -> LlguidanceState:
        """The state of an answer after `output`. Raises GrammarRefused when that does not fit."""
        matcher = self._matcher.deep_copy()
        if output and not matcher.consume_tokens(list(output)):
            raise GrammarRefused("the tokens that the answer has begun with do not fit its grammar")
        return LlguidanceState(matcher, self._vocab_size, end, len(output), self._first_s)


class LlguidanceState:
    """Implements `workers.engine.masks.GrammarState`."""

    def __init__(
        self, matcher: LLMatcher, vocab_size: int, end: AnswerEnd, num_output: int, cost_s: float
    ) -> None:
        self.cost_s = cost_s
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._end = end
        self._num_output = num_output
        self._rows: list[bytes | None] = []
        self._failure: str | None = None
        self._spent_s = 0.0
        self._is_complete = False

    @property
    def is_complete(self) -> bool:
        return self._is_complete

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        return 0 if self._failure is not None else self._matcher.validate_tokens(list(token_ids))

    def accept(self, token_id: int) -> None:
        if self._failure is not None:
            return
        began = time.thread_time()
        self._num_output += 1
        if not self._matcher.consume_token(token_id):
            self._failure = _first_line(self._matcher.get_error())
        elif self._matcher.is_stopped():
            self._is_complete = True
        elif self._matcher.is_accepting() and not self._may_end(0):
            # No token will end it, so it has to be found out here whether anything can follow.
            try:
                self._is_complete = not self._followers()[0].any()
            except GrammarFailed as failed:
                self._failure = str(failed)
        self._spent_s += time.thread_time() - began

    def fill(self, drafts: Sequence[int]) -> None:
        began = time.thread_time()
        num_consumed = 0
        self._rows = []
        try:
            for index in range(len(drafts) + 1):
                self._rows.append(self._row(index))
                if index < len(drafts):
                    if not self._matcher.consume_token(drafts[index]):
                        raise GrammarFailed(_first_line(self._matcher.get_error()))
                    num_consumed += 1
            if num_consumed:
                self._matcher.rollback(num_consumed)
            spent_s = self._spent_s + time.thread_time() - began
            if spent_s > _MAX_FIRST_S + _MAX_TOKEN_S * self._num_output:
                raise GrammarFailed(f"it took {spent_s:.1f} s of computing for {self._num_output} tokens")
        except GrammarFailed as failed:
            self._failure = str(failed)
        self.cost_s = time.thread_time() - began
        self._spent_s += self.cost_s

    def bits(self, num_drafts: int) -> bytes | None:
        if self._failure is not None:
            message = f"The answer's grammar cannot go on after {self._num_output} tokens: {self._failure}"
            raise GrammarFailed(message)
        return self._rows[num_drafts]

    def _may_end(self, num_drafts: int) -> bool:
        """Whether a token may end the answer when the grammar may."""
        return bool(self._end.token_ids) and self._num_output + num_drafts >= self._end.min_tokens

    def _row(self, num_drafts: int) -> bytes | None:
        """None: nothing is forbidden, because this row's token will not be looked at."""
        bits, is_accepting = self._followers()
        is_last = not bits.any()
        if is_accepting and (self._may_end(num_drafts) or (is_last and self._end.token_ids)):
            for token_id in self._end.token_ids:
                bits[token_id >> 3] |= 1 << (token_id & 7)
        elif is_last and num_drafts:
            return None  # complete after these drafts
        elif is_last:
            raise GrammarFailed("no token of the model's vocabulary goes on with it")
        return bits.tobytes()

    def _followers(self) -> tuple[_Bits, bool]:
        """Tokens that the grammar goes on with (packed, lowest bit first), and whether it may end."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8).copy()
        if self._matcher.is_error():
            raise GrammarFailed(_first_line(self._matcher.get_error()))
        place, mask = self._vocab_size >> 3, 1 << (self._vocab_size & 7)
        is_accepting = bool(bits[place] & mask)
        bits[place] &= mask - 1
        bits[place + 1 :] = 0
        return bits, is_accepting


def check_first(matcher: LLMatcher, vocab_size: int) -> float:
    """Seconds of computing for a first token. Raises GrammarFailed when no answer can begin, or only an empty
    one. Leaves the matcher as it is."""
    began = time.thread_time()
    end = AnswerEnd(token_ids=(), min_tokens=0)
    LlguidanceState(matcher.deep_copy(), vocab_size, end, 0, 0.0)._row(0)
    return time.thread_time() - began


def _first_line(text: str) -> str:
    return text.partition("\n")[0][:300]
