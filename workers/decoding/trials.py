"""When guesses are tried that do not seem to pay: what is never tried is never learnt anew."""

from __future__ import annotations

_EVERY = 32  # steps without guesses, or without more than pay
_MORE = 2  # guesses, more than pay, in a trial of more
_MOST_VAIN = 2  # trials of trees in a row that did not pay, each of which doubles the steps to the next
_AT_REST = 8  # steps for which guesses of trees that do not pay are not reckoned anew, which takes time, too


class GuessTrials:
    """Counts the steps up to the next one. What was found with so many sequences holds for as many only."""

    def __init__(self, *, of_trees: bool) -> None:
        self.plain_s = 0.0  # taken by steps since the last guesses
        self._of_trees = of_trees
        self._plain = 0  # steps without guesses
        self._without_more = 0  # steps with guesses
        self._resting = (0, 0)  # steps to rest, with so many sequences
        self._vain = (0, 0)  # trials, with so many sequences

    def is_due(self, num_sequences: int) -> bool:
        vain, as_many = self._vain
        return self._plain + 1 >= _EVERY << (vain if as_many == num_sequences else 0)

    def is_resting(self, num_sequences: int) -> bool:
        rest, as_many = self._resting
        return rest > 0 and as_many == num_sequences

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

    def pass_over(self, num_sequences: int) -> None:
        """A step for which nobody has looked for guesses."""
        self._plain += 1
        if self.is_resting(num_sequences):
            self._resting = (self._resting[0] - 1, num_sequences)

    def find_none(self, num_sequences: int) -> None:
        """A step for which none seem to pay."""
        self._plain += 1
        if self._of_trees:
            self._resting = (_AT_REST, num_sequences)

    def put_off(self) -> None:
        """One was due, but none can be had."""
        self._plain = 0

    def try_some(self, num_sequences: int) -> None:
        """One is due, and made."""
        self._plain, self.plain_s = 0, 0.0
        if self._of_trees:
            vain, as_many = self._vain
            before = vain if as_many == num_sequences else 0
            self._vain = (min(_MOST_VAIN, before + 1), num_sequences)
