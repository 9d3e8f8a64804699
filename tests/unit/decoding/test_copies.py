"""Tokens that came after the same ones before, and how likely they are to come again."""

from __future__ import annotations

from math import exp

import pytest

from workers.decoding.chances import Chance
from workers.decoding.copies import Copies

ROUND = (1, 2, 3, 4, 5)


def chance_of(copies: Copies) -> float:
    return exp(copies.propose(1).score)


def test_it_says_what_came_after_the_same_tokens() -> None:
    copies = Copies(Chance())
    copies.extend((*ROUND, 9, 1, 2))
    assert copies.propose(3).token_ids == (3, 4, 5)
    assert copies.num_tokens == 8
    assert Copies(Chance()).propose(3).token_ids == ()


def test_it_learns_from_what_comes_checked_or_not() -> None:
    prior = Chance()
    copies = Copies(prior)
    copies.extend((*ROUND, 9, 1, 2))
    assert chance_of(copies) == pytest.approx(0.5)
    copies.extend((3,))  # as it said
    assert chance_of(copies) > 0.6 and prior.value > 0.6
    copies.extend((7, 1, 2))  # 4 was said to come
    before = chance_of(copies)
    copies.extend((3, 4))  # one of them was asked for
    assert before < chance_of(copies)


def test_tokens_after_which_nothing_was_said_teach_nothing() -> None:
    prior = Chance()
    copies = Copies(prior)
    copies.extend(ROUND)
    copies.propose(4)
    copies.extend((8, 8))
    assert prior.value == 0.5
