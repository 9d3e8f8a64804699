"""When guessing fails: an answer needs no guesses, so it costs nothing but them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from workers.engine.step import GroupFailed

_MOST_IN_A_ROW = 3

_log = logging.getLogger(__name__)


class GuessFailures:
    """Of one engine: counts them, and says when to guess no more."""

    def __init__(self) -> None:
        self.num_total = 0
        self.is_off = False  # for good: the group has to be started anew
        self._in_a_row = 0

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Around what looks for the guesses of a step. An exception ends it and goes no further, but for
        GroupFailed: then the rank cannot compute steps either."""
        try:
            yield
        except GroupFailed:
            raise
        except Exception as error:
            if self._in_a_row == 0:
                _log.exception("guessing fails: this step goes without")
            self._note(repr(error))

    def note_success(self) -> None:
        """Guesses were made."""
        self._in_a_row = 0

    def note_not_finite(self) -> None:
        """What guesses has computed values that are no numbers, perhaps for one prompt and not for others."""
        if self._in_a_row == 0:
            _log.error("what guesses has computed values that are not finite numbers")
        self._note("values that are not finite numbers")

    def _note(self, what: str) -> None:
        self.num_total += 1
        self._in_a_row += 1
        if self._in_a_row >= _MOST_IN_A_ROW:
            self.is_off = True
            _log.error(
                "nothing is guessed any more until this group is started anew: %d failures in a row, "
                "the last one %s",
                *(self._in_a_row, what),
            )
