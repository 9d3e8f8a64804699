"""How long steps take by their rows, and how long a draft model takes to read."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from math import log

_GROWTH = 1.25  # of rows from one measured number to the next
# Beyond the most rows measured, so many may be tried without a measurement.
_TRIED, _TRIED_ROWS = 1.25, 3
_SHORTEST_S = 1e-6  # of a step
_WEIGHT = 0.2  # of the newest step in the mean of its number of rows
# Times that mean, which a step counts for at most: one that is disturbed may take ten times as long.
_MOST_NEWS = 1.5
_FIRST = 3  # steps of a number of rows of which the shortest counts: what is done first takes longer
_READ_WEIGHT = 256  # tokens; a pass that reads more than that counts for more than all before it


class StepTimes:
    """Mean time of a step by its rows, seconds; never longer with fewer rows.

    What disturbs a measurement makes it longer, so of two that do not fit together the shorter counts. One
    that has become too short is corrected by the steps that it brings about.
    """

    def __init__(self) -> None:
        self._rows: list[float] = []  # rising
        self._seconds: list[float] = []
        self._buckets: list[int] = []
        self._counts: list[int] = []

    def observe(self, num_rows: int, seconds: float) -> None:
        """A step of `num_rows` has taken so long."""
        seconds = max(seconds, _SHORTEST_S)
        bucket = round(log(num_rows, _GROWTH))
        index = bisect_left(self._buckets, bucket)
        if index == len(self._buckets) or self._buckets[index] != bucket:
            self._buckets.insert(index, bucket)
            self._rows.insert(index, float(num_rows))
            self._seconds.insert(index, seconds)
            self._counts.insert(index, 1)
            return
        mean = self._seconds[index]
        self._rows[index] += _WEIGHT * (num_rows - self._rows[index])
        self._counts[index] += 1
        if self._counts[index] <= _FIRST:
            self._seconds[index] = min(seconds, mean)
        else:
            self._seconds[index] += _WEIGHT * (min(seconds, _MOST_NEWS * mean) - mean)

    @property
    def is_empty(self) -> bool:
        """Nothing has been observed: `of` has no answer."""
        return not self._rows

    def of(self, num_rows: float) -> float:
        """Between what has been measured. A little beyond it, as long as the nearest, to be found out by
        trying; further beyond, longer in proportion."""
        index = bisect_left(self._rows, num_rows)
        if index == len(self._rows):
            return self._seconds[-1] * max(1.0, num_rows / self._tried)
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
        if first < self._tried < last:
            yield self._tried
        yield last

    @property
    def _tried(self) -> float:
        return max(_TRIED * self._rows[-1], self._rows[-1] + _TRIED_ROWS)


class ReadingTime:
    """Mean time that a token takes to be read beside the one that is guessed from, seconds."""

    def __init__(self) -> None:
        self._per_token_s: float | None = None

    def observe(self, num_tokens: int, seconds: float) -> None:
        """So many tokens, more than none, made a pass so much longer."""
        found = max(0.0, seconds) / num_tokens
        if self._per_token_s is None:
            self._per_token_s = found
        else:
            weight = num_tokens / (num_tokens + _READ_WEIGHT)
            self._per_token_s += weight * (found - self._per_token_s)

    def of(self, num_tokens: int) -> float:
        """Of so many; 0 before anything has been read: it is found out by reading."""
        return num_tokens * (self._per_token_s or 0.0)
