"""The likeliest tokens of several places, as a tree."""

from __future__ import annotations

from math import inf, log

from workers.decoding.guess_tree import GrowingTree, depth_of

FIRST = [(7, log(0.6)), (8, log(0.3)), (9, log(0.1))]
SECOND = [(17, log(0.6)), (18, log(0.4))]


def test_the_likeliest_come_first_and_after_what_they_follow() -> None:
    tree = GrowingTree(4)
    assert tree.grow(FIRST, -inf) == 7
    assert tree.grow(SECOND, -inf) == 17
    # .6 | 7-17 .36 | 8 .3 | 7-18 .24 | 9 .1
    assert tree.likeliest(-inf) == ((7, 17, 8, 18), (-1, 0, -1, 0))
    assert depth_of(tree.likeliest(-inf).parents) == 2


def test_one_token_a_place_is_a_chain() -> None:
    tree = GrowingTree(5)
    for place in ([(7, log(0.6))], [(17, log(0.5))], [(27, log(0.9))]):
        assert tree.grow(place, -inf) == place[0][0]
    assert tree.likeliest(-inf) == ((7, 17, 27), (-1, 0, 1))


def test_nothing_is_looked_for_after_what_is_unlikely_or_has_no_room_behind_it() -> None:
    assert GrowingTree(5).grow(FIRST, log(0.61)) is None
    tree = GrowingTree(5)
    assert tree.grow(FIRST, log(0.5)) == 7
    assert tree.grow(SECOND, log(0.5)) is None  # 0.36 with what it follows
    assert GrowingTree(1).grow(FIRST, -inf) is None
    small = GrowingTree(2)
    assert small.grow(FIRST, -inf) == 7
    assert small.grow(SECOND, -inf) is None  # the second of two


def test_unlikely_tokens_are_left_out_but_for_the_first() -> None:
    tree = GrowingTree(5)
    tree.grow(FIRST, -inf)
    assert tree.likeliest(log(0.2)) == ((7, 8), (-1, -1))
    assert tree.likeliest(log(0.9)) == ((7,), (-1,))


def test_of_nothing_there_is_no_tree() -> None:
    assert GrowingTree(5).likeliest(-inf) == ((), ())
    tree = GrowingTree(0)
    tree.grow(FIRST, -inf)
    assert tree.likeliest(-inf) == ((), ())
    assert depth_of(()) == 0
