"""How many guessed tokens a step should check: as many as bring the most tokens a second.

A guess that is checked costs a row of the step, and is worth its chance of being right. What a row costs
depends on the machine and on how many rows there are already: with few, the weights are read for all of them
at once and a further row is nearly free; with many, each takes its time. So both sides are measured:

    time of a step      by number of rows, from the steps themselves
    chance of a guess   from what became of the sequence's guesses so far
    time of guessing    by number of sequences in one pass of what guesses, if that takes time at all

and the guesses with the best chances are taken while the expected tokens a second rise (goodput, as in Liu et
al., "Optimizing Speculative Decoding for Serving Large Language Models Using Goodput", 2024). Looking for
guesses takes time, too: where none could pay, nobody looks.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heapreplace
from itertools import accumulate, repeat
from math import log
from operator import mul

_GROWTH = 1.25  # of rows from one measured number to the next
_TRIED = 1.5  # times the most rows measured may be tried without a measurement
_SHORTEST_S = 1e-6  # of a step
_WEIGHT = 0.2  # of the newest step in the mean of its number of rows
_MARGIN = 1.02  # guesses have to promise so much more than none: both sides are estimates
_PROBE_EVERY = 32  # steps without guesses
_FADE = 0.9  # of what is known of a sequence's guesses, per check
_PRIOR_CHECKS = 2.0  # that the chance of all sequences weighs in the one of a sequence
_FIRST_CHANCE = 0.5
_TREE_FADE = 0.98  # of what is known of the guesses of trees, per tree of any sequence


class Chance:
    """How likely a guess is to be right, given that those before it were: faded counts over a prior."""

    def __init__(self, prior: Chance | None = None) -> None:
        """`prior`: of all sequences together; it learns along."""
        self._prior = prior
        self._right = self._wrong = 0.0

    @property
    def value(self) -> float:
        """From 0 to 1."""
        first = _FIRST_CHANCE if self._prior is None else self._prior.value
        return (self._right + _PRIOR_CHECKS * first) / (self._right + self._wrong + _PRIOR_CHECKS)

    def observe(self, num_drafts: int, num_right: int) -> None:
        """Of `num_drafts` guesses the first `num_right` were right; the one after them, if any, was not."""
        self._right = self._right * _FADE + num_right
        self._wrong = self._wrong * _FADE + (num_right < num_drafts)
        if self._prior is not None:
            self._prior.observe(num_drafts, num_right)


class StepTimes:
    """Mean time of a step by its rows, seconds; never longer with fewer rows.

    What disturbs a measurement makes it longer, so of two that do not fit together the shorter counts. One
    that has become too short is corrected by the steps that it brings about.
    """

    def __init__(self) -> None:
        self._rows: list[float] = []  # rising
        self._seconds: list[float] = []
        self._buckets: list[int] = []

    def observe(self, num_rows: int, seconds: float) -> None:
        """A step of `num_rows` has taken so long."""
        seconds = max(seconds, _SHORTEST_S)
        bucket = round(log(num_rows, _GROWTH))
        index = bisect_left(self._buckets, bucket)
        if index == len(self._buckets) or self._buckets[index] != bucket:
            self._buckets.insert(index, bucket)
            self._rows.insert(index, float(num_rows))
            self._seconds.insert(index, seconds)
        else:
            self._rows[index] += _WEIGHT * (num_rows - self._rows[index])
            self._seconds[index] += _WEIGHT * (seconds - self._seconds[index])

    @property
    def is_empty(self) -> bool:
        """Nothing has been observed: `of` has no answer."""
        return not self._rows

    def of(self, num_rows: float) -> float:
        """Between what has been measured. A little beyond it, as long as the nearest, to be found out by
        trying; further beyond, longer in proportion."""
        index = bisect_left(self._rows, num_rows)
        if index == len(self._rows):
            return self._seconds[-1] * max(1.0, num_rows / (_TRIED * self._rows[-1]))
        after = min(self._seconds[index:])
        if index == 0:
            return after
        before = min(self._seconds[index - 1], after)
        low, high = self._rows[index - 1], self._rows[index]
        return before + (after - before) * (num_rows - low) / (high - low)

    def bends(self, first: int, last: int) -> Iterable[float]:
        """Numbers of rows above `first`, up to `last`, between which the time is a straight line."""
        for rows in self._rows[bisect_right(self._rows, first) :]:
            if rows >= last:
                break
            yield rows
        if first < _TRIED * self._rows[-1] < last:
            yield _TRIED * self._rows[-1]
        yield last


class _Passes:
    """The passes that make some guesses, and what they take, seconds. A guess of a sequence is made in a pass
    of its own, which it shares with those of other sequences."""

    def __init__(self, times: StepTimes, num_sequences: int) -> None:
        self._by_rows = [0.0] * (num_sequences + 1)  # seconds of a pass
        if not times.is_empty:
            self._by_rows[1:] = map(times.of, range(1, num_sequences + 1))
        self._rows: list[int] = []  # of each pass
        self.seconds = 0.0

    def add(self, number: int) -> None:
        """One more sequence has a guess of this number, from 0; it has those before it already."""
        if number == len(self._rows):
            self._rows.append(0)
        rows = self._rows[number]
        self._rows[number] += 1
        self.seconds += self._by_rows[rows + 1] - self._by_rows[rows]


class TreeChances:
    """How likely each guess of a tree is to be right, by its number in the tree, likeliest first."""

    def __init__(self) -> None:
        self._right: list[float] = []
        self._seen: list[float] = []

    def observe(self, num_guesses: int, right: Iterable[int]) -> None:
        """A tree of so many guesses was checked, and these came true."""
        missing = num_guesses - len(self._seen)
        self._seen += [0.0] * missing
        self._right += [0.0] * missing
        for number in range(num_guesses):
            self._seen[number] = self._seen[number] * _TREE_FADE + 1.0
            self._right[number] *= _TREE_FADE
        for number in right:
            self._right[number] += 1.0

    def values(self, num_guesses: int) -> list[float]:
        """From 0 to 1. What was never tried is somewhat less likely than the one before it."""
        found: list[float] = []
        for number in range(num_guesses):
            first = (found[-1] if found else 1.0) * _FIRST_CHANCE
            right, seen = (
                (self._right[number], self._seen[number]) if number < len(self._seen) else (0.0, 0.0)
            )
            found.append((right + _PRIOR_CHECKS * first) / (seen + _PRIOR_CHECKS))
        return found


class Governor:
    """Of one engine: measures its steps and says how long drafts may be."""

    def __init__(self, *, has_trees: bool = False) -> None:
        """has_trees: guesses of a sequence are a tree, made in one pass; else a chain, made one by one."""
        self._tree = TreeChances() if has_trees else None
        self.chance = Chance()  # of all sequences
        self._times = StepTimes()
        self._pass_times = StepTimes()
        self._since_probe = 0

    def observe(self, num_rows: int, seconds: float) -> None:
        """A step that decoded only, with `num_rows` rows, drafts among them; the time without guessing."""
        self._times.observe(num_rows, seconds)

    def is_worth_looking(self, chances: Sequence[float], most: int, max_rows: int) -> bool:
        """Whether to look for guesses and to ask for `lengths`: not where none can pay, even if there were
        `most` for each sequence; but now and then all the same: what is never tried is never learnt anew."""
        room = min(max_rows - len(chances), most * len(chances))
        if self._times.is_empty or room < 1:
            return False
        if self._is_probe_due or self._may_pay(chances, room):
            return True
        self._since_probe += 1
        return False

    def observe_tree(self, parents: Sequence[int], last: int) -> None:
        """Of a tree of guesses, which may be a chain, those up to the one of number `last` came true; -1:
        none. Counts where guesses are made as trees."""
        if self._tree is None:
            return
        right = []
        while last >= 0:
            right.append(last)
            last = parents[last]
        self._tree.observe(len(parents), right)

    def observe_pass(self, num_rows: int, seconds: float) -> None:
        """A pass that made a guess for each of some sequences."""
        self._pass_times.observe(num_rows, seconds)

    def lengths(self, chances: Sequence[float], limits: Sequence[int], max_rows: int) -> list[int]:
        """How many guesses of each sequence to check, at most `limits`, so that a step of one row a sequence
        and these has no more than `max_rows`."""
        lengths = [0] * len(chances)
        if self._times.is_empty:
            return lengths
        worths = self._worths(chances, limits)
        order = _by_worth(worths, max_rows - len(chances))
        for index in order[: self._num_worth(worths, order)]:
            lengths[index] += 1
        if any(lengths):
            self._since_probe = 0
        elif self._is_probe_due:
            self._since_probe = 0
            if order:
                lengths[order[0]] = min(limits[order[0]], max_rows - len(chances))
        else:
            self._since_probe += 1
        return lengths

    @property
    def _is_probe_due(self) -> bool:
        return self._since_probe + 1 >= _PROBE_EVERY

    def _may_pay(self, chances: Sequence[float], room: int) -> bool:
        """Whether up to `room` guesses could pay if each were as likely right as the likeliest one. Where
        tokens and times grow in straight lines, the best number is at the end of a line."""
        rows, best = len(chances), max(chances)
        least_rate = _MARGIN * rows / self._times.of(rows)
        return any(
            rows + best * (more - rows) > least_rate * self._times.of(more)
            for more in self._times.bends(rows, rows + room)
        )

    def _worths(self, chances: Sequence[float], limits: Sequence[int]) -> list[list[float]]:
        """Of each guess of each sequence, how likely it is to be right, with all that it follows."""
        if self._tree is not None:
            values = self._tree.values(max(limits, default=0))
            return [values[:limit] for limit in limits]
        return [
            list(accumulate(repeat(chance, limit), mul))
            for chance, limit in zip(chances, limits, strict=True)
        ]

    def _num_worth(self, worths: Sequence[Sequence[float]], order: Sequence[int]) -> int:
        """How many of the guesses in `order` (the sequence of each) make the most tokens a second."""
        tokens, rows, best = float(len(worths)), len(worths), 0
        best_rate = _MARGIN * tokens / self._times.of(rows)
        lengths = [0] * len(worths)
        passes = _Passes(self._pass_times, len(worths))
        for count, index in enumerate(order, 1):
            tokens += worths[index][lengths[index]]
            if self._tree is None or lengths[index] == 0:
                passes.add(lengths[index])
            lengths[index] += 1
            rate = tokens / (self._times.of(rows + count) + passes.seconds)
            if rate > best_rate:
                best_rate, best = rate, count
        return best


def _by_worth(worths: Sequence[Sequence[float]], most: int) -> list[int]:
    """The sequence of each guess, those first that are most likely right, with all that they follow."""
    heap = [(-own[0], index) for index, own in enumerate(worths) if own]
    heapify(heap)
    taken = [0] * len(worths)
    order: list[int] = []
    while heap and len(order) < most:
        index = heap[0][1]
        order.append(index)
        taken[index] += 1
        if taken[index] < len(worths[index]):
            heapreplace(heap, (-worths[index][taken[index]], index))
        else:
            heappop(heap)
    return order
