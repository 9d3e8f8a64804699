"""Which graphs there are, and which one a step gets."""

from __future__ import annotations

import pytest

from workers.runtime.graphs.buckets import Buckets, GraphKey


def test_rows_are_close_where_they_are_few() -> None:
    assert Buckets(128, 512).rows == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128)
    assert Buckets(300, 512).rows[-3:] == (240, 256, 300)
    assert Buckets(6, 512).rows == (1, 2, 4, 6)
    assert Buckets(1, 512).rows == (1,)


def test_contexts_double() -> None:
    assert Buckets(1, 4096).contexts == (512, 1024, 2048, 4096)
    assert Buckets(1, 5000).contexts == (512, 1024, 2048, 4096, 5000)
    assert Buckets(1, 100).contexts == (100,)


def test_the_largest_is_recorded_first() -> None:
    assert Buckets(2, 1000).keys() == [(2, 1000), (1, 1000), (2, 512), (1, 512)]


@pytest.mark.parametrize(
    ("rows", "context", "key"),
    [
        (1, 1, GraphKey(1, 512)),
        (3, 512, GraphKey(4, 512)),
        (9, 513, GraphKey(16, 1000)),
        (20, 1000, GraphKey(20, 1000)),
        (21, 1000, None),
        (20, 1001, None),
        (0, 0, None),
        (-1, 5, None),
    ],
)
def test_a_step_gets_the_smallest_that_holds_it(rows: int, context: int, key: GraphKey | None) -> None:
    assert Buckets(20, 1000).key_of(rows, context) == key
