"""A compiled grammar and how far one answer has come in it.

Which tokens may come next: those that the grammar goes on with, and where it may end, the ids that end the
choice. `llguidance` lets other threads run while it finds them.

The states of a grammar's lexer are shared by all answers that follow it, and there may be so many and no
more. So they run out in the course of many answers: the answer that finds no room compiles the grammar anew
and replays its tokens, those after it begin there too, and the old lexer goes when nobody has it any more.
An answer that needs more states for itself at one point ends.

Guesses end no answer: what follows them is looked for in the time that a token may take, it is not the
answer's that pays, and where it cannot be found the answer goes on without guesses.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from workers.engine.grammars import AnswerEnd, GrammarRefused
from workers.engine.step import GrammarFailed

# CPU time of the thread, so that a busy machine changes nothing: an answer's in all, and more by token.
_MAX_FIRST_S = 0.5
_MAX_TOKEN_S = 0.01
_NO_ROOM = "too many states"  # in the error of a matcher whose lexer may have no more; no code says so

_Bits = npt.NDArray[np.uint8]
Result = TypeVar("Result")


class LlguidanceGrammar:
    """Implements `workers.engine.grammars.CompiledGrammar`. Any thread may use it."""

    def __init__(self, make: Callable[[], LLMatcher], vocab_size: int, num_bytes: int) -> None:
        """make: compiles it; a matcher at the beginning, and good. Raises GrammarFailed when no answer can
        begin, or only an empty one, and what `make` raises."""
        self.num_bytes = num_bytes
        self._make = make
        self._vocab_size = vocab_size
        self._lock = threading.Lock()  # guards the two below
        self._matcher = make()  # copies have its lexer
        self._number = 0  # of that lexer
        self._first_s = self._seconds_of_first()

    def begin(self, end: AnswerEnd, output: Sequence[int]) -> LlguidanceState:
        """The state of an answer after `output`. Raises GrammarRefused when that does not fit."""
        return LlguidanceState(self, self._vocab_size, end, output, self._first_s)

    def copy(self, full: int | None = None) -> tuple[LLMatcher, int]:
        """A matcher at the beginning, and the number of its lexer: of another one than `full`."""
        with self._lock:
            if full == self._number:
                self._matcher = self._make()
                self._number += 1
            return self._matcher.deep_copy(), self._number

    def _seconds_of_first(self) -> float:
        """Of computing, for a first token."""
        began = time.thread_time()
        LlguidanceState(self, self._vocab_size, AnswerEnd(token_ids=(), min_tokens=0), (), 0.0).first_row()
        return time.thread_time() - began


class LlguidanceState:
    """Implements `workers.engine.masks.GrammarState`."""

    def __init__(
        self,
        grammar: LlguidanceGrammar,
        vocab_size: int,
        end: AnswerEnd,
        output: Sequence[int],
        cost_s: float,
    ) -> None:
        """Raises GrammarRefused when `output` does not fit."""
        self.cost_s = cost_s
        self._grammar = grammar
        self._vocab_size = vocab_size
        self._end = end
        self._tokens: list[int] = []  # of the answer, but for one that ends it
        self._matcher, self._number = grammar.copy()
        self._is_behind = False  # the matcher has not taken the tokens yet
        self._rows: list[bytes | None] = []
        self._failure: str | None = None
        self._spent_s = 0.0
        self._compiling_s = 0.0
        self._is_complete = False
        self._takes_guesses = True
        try:
            self._with_room(lambda: self._consume(output))
        except GrammarFailed as failed:
            raise GrammarRefused(
                f"the tokens that the answer has begun with do not fit its grammar: {failed}"
            ) from None
        self._tokens += output

    @property
    def is_complete(self) -> bool:
        return self._is_complete

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        if self._failure is not None or not self._takes_guesses:
            return 0
        most = int(_MAX_TOKEN_S / self.cost_s) - 1 if self.cost_s > 0 else len(token_ids)
        num_allowed = self._matcher.validate_tokens(list(token_ids[: max(0, most)]))
        if self._matcher.is_error():
            self._end_guesses()
            return 0
        return num_allowed

    def accept(self, token_id: int) -> None:
        if self._failure is not None:
            return
        began = self._own_s()
        try:
            self._with_room(lambda: self._consume((token_id,)))
            self._tokens.append(token_id)
            self._is_complete = self._with_room(self._has_ended)
        except GrammarFailed as failed:
            self._failure = str(failed)
        self._spent_s += self._own_s() - began

    def fill(self, drafts: Sequence[int]) -> None:
        try:
            self._fill(drafts)
        except GrammarFailed as failed:
            if not drafts:
                self._failure = str(failed)
                return
            self._end_guesses()
            self.fill(())

    def _fill(self, drafts: Sequence[int]) -> None:
        """Raises GrammarFailed."""
        began = self._own_s()
        self._rows = self._with_room(lambda: self._rows_of(drafts), most_others=1 if drafts else 2)
        self.cost_s = (self._own_s() - began) / len(self._rows)
        self._spent_s += self.cost_s
        if self._spent_s > _MAX_FIRST_S + _MAX_TOKEN_S * len(self._tokens):
            raise GrammarFailed(f"it took {self._spent_s:.1f} s of computing for {len(self._tokens)} tokens")

    def bits(self, num_drafts: int) -> bytes | None:
        if self._failure is not None:
            message = f"The answer's grammar cannot go on after {len(self._tokens)} tokens: {self._failure}"
            raise GrammarFailed(message)
        if num_drafts >= len(self._rows):
            raise GrammarFailed("What may follow these guesses was not found.")
        return self._rows[num_drafts]

    def first_row(self) -> bytes | None:
        """What `bits(0)` gives out after `fill(())`. Raises GrammarFailed."""
        return self._row(0)

    def _with_room(self, call: Callable[[], Result], most_others: int = 2) -> Result:
        """What it gives; called again, with up to `most_others` other lexers, when this one has no room. The
        next one may be full of others' states too, the one after that is new. It begins with the matcher
        behind the tokens. Raises GrammarFailed."""
        for is_last in (*[False] * most_others, True):
            try:
                if self._is_behind:
                    self._consume(self._tokens)
                    self._is_behind = False
                return call()
            except GrammarFailed:
                if is_last or _NO_ROOM not in self._matcher.get_error():
                    raise
            self._begin_anew(full=self._number)
        raise AssertionError("the last call returns or raises")

    def _end_guesses(self) -> None:
        """Nothing that follows guesses is looked for any more: the matcher cannot come back from there."""
        self._takes_guesses = False
        self._begin_anew()

    def _begin_anew(self, full: int | None = None) -> None:
        """With a matcher behind the tokens, of another lexer than `full`."""
        began = time.thread_time()
        self._matcher, self._number = self._grammar.copy(full)
        self._compiling_s += time.thread_time() - began
        self._is_behind = True

    def _own_s(self) -> float:
        """CPU time of the thread without what went into new lexers: those are for all answers, and others
        have used the states up. Differences count."""
        return time.thread_time() - self._compiling_s

    def _consume(self, token_ids: Sequence[int]) -> None:
        """Raises GrammarFailed when they do not follow."""
        if token_ids and not self._matcher.consume_tokens(list(token_ids)):
            raise GrammarFailed(_first_line(self._matcher.get_error()))

    def _has_ended(self) -> bool:
        """Whether nothing may follow. Where a token will end it, that is the engine's to see."""
        if self._matcher.is_stopped():
            return True
        return self._matcher.is_accepting() and not self._may_end(0) and not self._followers()[0].any()

    def _rows_of(self, drafts: Sequence[int]) -> list[bytes | None]:
        """For the next token and the one after each of the drafts."""
        rows = [self._row(0)]
        for index in range(len(drafts)):
            self._consume(drafts[index : index + 1])
            rows.append(self._row(index + 1))
        if drafts and not self._matcher.rollback(len(drafts)):
            raise GrammarFailed(_first_line(self._matcher.get_error()))
        return rows

    def _may_end(self, num_drafts: int) -> bool:
        """Whether a token may end the answer when the grammar may."""
        return bool(self._end.token_ids) and len(self._tokens) + num_drafts >= self._end.min_tokens

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


def _first_line(text: str) -> str:
    return text.partition("\n")[0][:300]
