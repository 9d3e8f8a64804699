"""Which tokens the grammars of answers go on with, found by a thread of its own beside the forward pass.

    fill(cursors) -> [ mask thread: one after the other ] -> bits(), as the sampler asks for them

The step waits for a mask that is not there yet, but not for ever.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Protocol, TypeVar

from workers.engine.step import AllowedTokens, GrammarFailed
from workers.types import TOO_BUSY

_MASK_TIMEOUT_S = 10.0  # for all masks of a step
# When those of a step have cost so much computing, the costly ones that are left are given up: many at the
# same time would hold up all others.
_MAX_STEP_S = 1.0
_CHEAP_S = 0.02

_log = logging.getLogger(__name__)

Result = TypeVar("Result")


class GrammarState(AllowedTokens, Protocol):
    """How far one answer has come in its grammar. Used by one thread at a time."""

    @property
    def is_complete(self) -> bool:
        """Nothing may follow."""
        ...

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """How many of them, from the first on, the grammar goes on with. The answer
        stays as it is; where there is no way back from guesses, it has none any more."""
        ...

    def accept(self, token_id: int) -> None:
        """The answer goes on with this token, which is none that ends it."""
        ...

    @property
    def cost_s(self) -> float:
        """Of the next `fill`, as far as one can tell; seconds of computing."""
        ...

    def fill(self, drafts: Sequence[int]) -> None:
        """Finds what `bits` gives out, for the next token and the one after each of the drafts, all of which
        the grammar allows. The state stays where it is."""
        ...


class _Filling:
    """What the mask thread does beside one step: the masks of several sequences, one after the other."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future
        self._is_late = False

    def wait(self) -> None:
        """Until all are done, or it has taken too long; from then on not at all."""
        if not self._is_late:
            self._is_late = not wait([self._future], _MASK_TIMEOUT_S).done


class GrammarCursor:
    """The state of one sequence, used in turn by the engine's thread and the mask thread. Whatever goes wrong
    with it comes out of `bits`, and ends its own request only."""

    def __init__(self, state: GrammarState) -> None:
        self._state = state
        self._filling: _Filling | None = None  # that has its mask among others
        self._is_filled = True  # it has come to it
        self._failure: GrammarFailed | None = None

    @property
    def is_complete(self) -> bool:
        return self._state.is_complete

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """See GrammarState; 0 when something has gone wrong."""
        return self._tried(lambda: self._settled().num_allowed(token_ids), 0)

    def accept(self, token_id: int) -> None:
        """See GrammarState."""
        self._tried(lambda: self._settled().accept(token_id), None)

    def bits(self, num_drafts: int) -> bytes | None:
        """See AllowedTokens."""
        state = self._settled()
        if self._failure is not None:
            raise GrammarFailed(str(self._failure), code=self._failure.code)
        return state.bits(num_drafts)

    def begin_filling(self) -> None:
        """`fill` is going to be called in the mask thread."""
        self._is_filled = False

    def filled_by(self, filling: _Filling) -> None:
        """Whoever asks next waits for it."""
        self._filling = filling

    @property
    def cost_s(self) -> float:
        """See GrammarState. In the mask thread."""
        return self._state.cost_s

    def give_up(self, why: str) -> None:
        """Instead of `fill`, in the mask thread: its request ends, by no fault of its own."""
        self._failure = GrammarFailed(why, code=TOO_BUSY)
        self._is_filled = True

    def fill(self, drafts: Sequence[int]) -> None:
        """In the mask thread, which others' masks come after."""
        self._tried(lambda: self._state.fill(drafts), None)
        self._is_filled = True

    def _settled(self) -> GrammarState:
        """Raises GrammarFailed when it takes too long."""
        if not self._is_filled:
            assert self._filling is not None
            self._filling.wait()
            if not self._is_filled:
                raise GrammarFailed(
                    f"What may come next in this answer was not known after {_MASK_TIMEOUT_S:g} s, because "
                    "the grammars of answers take too long to compute. Try again later.",
                    code=TOO_BUSY,
                )
        self._filling = None
        return self._state

    def _tried(self, call: Callable[[], Result], otherwise: Result) -> Result:
        """What it gives; `otherwise` when something goes wrong, which is kept for `bits`."""
        try:
            return call()
        except GrammarFailed as error:
            self._failure = error
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # what an extension in Rust raises when it panics is no Exception
            _log.exception("the grammar of an answer fails")
            message = f"The grammar of this answer failed ({type(error).__name__})."
            self._failure = GrammarFailed(message, code="internal_error")
        return otherwise


class Masks:
    """The mask thread. Used by the engine's thread."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None  # once it is needed

    def fill(self, work: Sequence[tuple[GrammarCursor, Sequence[int]]]) -> None:
        """Has the masks of one step filled: cursors, each with the drafts of its slice."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "grammar-masks")
        for cursor, _ in work:
            cursor.begin_filling()
        filling = _Filling(self._thread.submit(_fill, work))
        for cursor, _ in work:
            cursor.filled_by(filling)

    def close(self) -> None:
        """Ends the thread once it has done what it is at. May be called twice, and last."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)


def _fill(work: Sequence[tuple[GrammarCursor, Sequence[int]]]) -> None:
    began_s = time.thread_time()
    for cursor, drafts in sorted(work, key=lambda each: each[0].cost_s):
        if cursor.cost_s > _CHEAP_S and time.thread_time() - began_s > _MAX_STEP_S:
            cursor.give_up(
                "Too many answers whose grammars are so costly to compute go on at the same time. Try again "
                "later."
            )
        else:
            cursor.fill(drafts)
