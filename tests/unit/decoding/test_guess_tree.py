"""The likeliest tokens of several places, as a tree."""

from __future__ import annotations

from itertools import product
from math import log

from workers.decoding.guess_tree import best_tree, depth_of

LEVELS = [
    [(7, log(0.6)), (8, log(0.3)), (9, log(0.1))],
    [(17, log(0.5)), (18, log(0.4))],
    [(27, log(0.9))],
]


def test_the_likeliest_come_first_and_after_what_they_follow() -> None:
    tree = best_tree(LEVELS, 6)
    # .6 | 7-17 .3, 8 .3 | 7-17-27 .27 | 7-18 .24 | 7-18-27 .216
    assert tree.token_ids == (7, 8, 17, 27, 18, 27) or tree.token_ids == (7, 17, 8, 27, 18, 27)
    assert all(parent < index for index, parent in enumerate(tree.parents))
    assert depth_of(tree.parents) == 3


def test_no_other_tree_of_the_same_size_is_likelier() -> None:
    everything = best_tree(LEVELS, 100)
    scores: list[float] = []
    ways: list[tuple[int, ...]] = []
    for token_id, parent in zip(everything.token_ids, everything.parents, strict=True):
        before = ways[parent] if parent >= 0 else ()
        scores.append((scores[parent] if parent >= 0 else 0.0) + dict(LEVELS[len(before)])[token_id])
        ways.append((*before, token_id))
    assert scores == sorted(scores, reverse=True)
    expected = {
        tuple(token_id for token_id, _ in way) for depth in (1, 2, 3) for way in product(*LEVELS[:depth])
    }
    assert set(ways) == expected and len(ways) == len(expected)


def test_one_token_a_level_is_a_chain() -> None:
    tree = best_tree([level[:1] for level in LEVELS], 5)
    assert tree == ((7, 17, 27), (-1, 0, 1))


def test_of_nothing_there_is_no_tree() -> None:
    assert best_tree([], 5) == ((), ())
    assert best_tree(LEVELS, 0) == ((), ())
    assert depth_of(()) == 0
