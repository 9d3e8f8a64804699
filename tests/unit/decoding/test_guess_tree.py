"""The likeliest tokens of several places, as a tree."""

from __future__ import annotations

from math import inf, log

from workers.decoding.guess_tree import GrowingTree, depth_of

FIRST = [(7, log(0.6)), (8, log(0.3)), (9, log(0.1))]
SECOND = [(17, log(0.6)), (18, log(0.4))]


def test_the_likeliest_come_first_and_after_what_they_follow() -> None:
    tree = GrowingTree(4)
    tree.grow(FIRST)
    tree.grow(SECOND)
    # .6 | 7-17 .36 | 8 .3 | 7-18 .24 | 9 .1
    assert tree.likeliest(-inf) == ((7, 17, 8, 18), (-1, 0, -1, 0))
    assert depth_of(tree.likeliest(-inf).parents) == 2


def test_one_token_a_place_is_a_chain() -> None:
    tree = GrowingTree(5)
    for place in ([(7, log(0.6))], [(17, log(0.5))], [(27, log(0.9))]):
        tree.grow(place)
    assert tree.likeliest(-inf) == ((7, 17, 27), (-1, 0, 1))


def test_a_chain_goes_along_what_is_known_and_then_its_own_way() -> None:
    tree = GrowingTree(6)
    tree.grow(FIRST)
    tree.grow(SECOND)
    tree.add_chain((7, 18, 28), log(0.9))  # .9, .81, .73: likelier than it seemed
    assert tree.likeliest(-inf) == ((7, 18, 28, 17, 8, 9), (-1, 0, 1, 0, -1, -1))
    tree.add_chain((9, 18), log(0.5))  # a token counts where it stands
    assert tree.likeliest(log(0.25)).token_ids == (7, 18, 28, 9, 17, 8)
    tree.add_chain((), log(0.5))
    assert tree.likeliest(log(0.25)).token_ids == (7, 18, 28, 9, 17, 8)


def test_unlikely_tokens_are_left_out_but_for_the_first() -> None:
    tree = GrowingTree(5)
    tree.grow(FIRST)
    assert tree.likeliest(log(0.2)) == ((7, 8), (-1, -1))
    assert tree.likeliest(log(0.9)) == ((7,), (-1,))


def test_of_nothing_there_is_no_tree() -> None:
    assert GrowingTree(5).likeliest(-inf) == ((), ())
    tree = GrowingTree(0)
    tree.grow(FIRST)
    assert tree.likeliest(-inf) == ((), ())
    assert depth_of(()) == 0
