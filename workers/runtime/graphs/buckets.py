"""For which sizes of a decode step there is a graph."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import Final, NamedTuple

_FIRST_ROWS: Final = (1, 2, 4, 8)
# (up to so many rows, in steps of so many): a padding row costs least where there are many rows anyway.
_ROW_STEPS: Final = ((64, 8), (256, 16), (1 << 16, 64))
_FIRST_CONTEXT: Final = 512  # tokens; the next bounds are twice as far each, so at most half of it is empty


class GraphKey(NamedTuple):
    """What a graph is made for."""

    rows: int  # sequences, a token each
    context: int  # tokens of the longest one, at most


class Buckets:
    """The graphs of a group: equal on all its ranks."""

    def __init__(self, max_rows: int, max_context: int) -> None:
        """max_rows: most sequences in a step; max_context: most tokens of one of them."""
        assert max_rows > 0 and max_context > 0, (max_rows, max_context)
        self.rows = tuple(_row_bounds(max_rows))
        self.contexts = tuple(_context_bounds(max_context))

    def keys(self) -> list[GraphKey]:
        """The largest first: what it allocates, the others use again."""
        return [GraphKey(rows, context) for context in self.contexts[::-1] for rows in self.rows[::-1]]

    def key_of(self, rows: int, context: int) -> GraphKey | None:
        """The smallest graph that holds such a step; None: there is none."""
        row, column = bisect_left(self.rows, rows), bisect_left(self.contexts, context)
        if rows < 1 or row == len(self.rows) or column == len(self.contexts):
            return None
        return GraphKey(self.rows[row], self.contexts[column])


def _row_bounds(most: int) -> Iterator[int]:
    bounds = list(_FIRST_ROWS)
    for limit, step in _ROW_STEPS:
        bounds += range(bounds[-1] + step, limit + 1, step)
    yield from (rows for rows in bounds if rows < most)
    yield most


def _context_bounds(most: int) -> Iterator[int]:
    bound = _FIRST_CONTEXT
    while bound < most:
        yield bound
        bound *= 2
    yield most
