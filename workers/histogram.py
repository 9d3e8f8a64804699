"""Counts of samples by size: what a histogram metric is made of, where it is counted and where it is read."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class HistogramCounts:
    """Samples per bucket, not cumulative, the last one without an upper bound; and their sum."""

    counts: tuple[int, ...] = ()
    total: float = 0.0


class HistogramCell:
    """Counts per bucket. `observe` is on the path of every token: one bisection, two additions."""

    __slots__ = ("buckets", "counts", "total")

    def __init__(self, buckets: Sequence[float]) -> None:
        """buckets: upper bounds, ascending; a sample equal to a bound is below it."""
        self.buckets = buckets
        self.counts = [0] * (len(buckets) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """One sample."""
        self.counts[bisect_left(self.buckets, value)] += 1
        self.total += value

    def counts_now(self) -> HistogramCounts:
        """A copy of the counts."""
        return HistogramCounts(counts=tuple(self.counts), total=self.total)


def doubling(first: float, num: int) -> tuple[float, ...]:
    """Bounds first, 2 first, 4 first, ..."""
    return tuple(first * 2**power for power in range(num))


def one_two_five(first: int, last: int) -> tuple[float, ...]:
    """Bounds 1, 2, 5, 10, 20, ... from the first to the last."""
    bounds = []
    power = 1
    while power <= last:
        bounds += [float(digit * power) for digit in (1, 2, 5) if first <= digit * power <= last]
        power *= 10
    return tuple(bounds)
