"""When guesses are tried that do not seem to pay: what is never tried is never learnt anew."""

from __future__ import annotations

_EVERY = 32  # steps without guesses, or without more than pay
_MORE = 2  # guesses, more than pay, in a trial of more
_MOST_VAIN = 2  # trials of trees in a row that did not pay, each of which doubles the steps to the next
_FEWER = 0.75  # times as many sequences are so much less work that guesses may pay again


class GuessTrials:
    """Counts the steps up to the next one."""

    def __init__(self, *, of_trees: bool) -> None:
        self.plain_s = 0.0  # taken by steps since the last guesses
        self._of_trees = of_trees
        self._plain = 0  # steps without guesses
        self._without_more = 0  # steps with guesses
        self._vain = (0, 0)  # trials, the last one with so many sequences

    def is_due(self, num_sequences: int) -> bool:
        return self._plain + 1 >= _EVERY << self._num_vain(num_sequences)

    def with_more(self, num_guesses: int) -> int:
        """So many pay; now and then some more: else steps that once took long, and guesses that once were
        wrong, would never be known better."""
        self._without_more = self._without_more + 1 if num_guesses else 0
        if self._without_more < _EVERY:
            return num_guesses
        self._without_more = 0
        return num_guesses + max(_MORE, num_guesses // 4)

    def pay(self) -> None:
        """A step with guesses that seem to pay."""
        self._plain, self.plain_s, self._vain = 0, 0.0, (0, 0)

    def pass_over(self) -> None:
        """A step without guesses, for which none seem to pay."""
        self._plain += 1

    def put_off(self) -> None:
        """One was due, but none can be had."""
        self._plain = 0

    def try_some(self, num_sequences: int) -> None:
        """One is due, and made."""
        self._plain, self.plain_s = 0, 0.0
        if self._of_trees:
            self._vain = (min(_MOST_VAIN, self._num_vain(num_sequences) + 1), num_sequences)

    def _num_vain(self, num_sequences: int) -> int:
        """Trials that say something of so many."""
        vain, as_many = self._vain
        return vain if num_sequences > _FEWER * as_many else 0
