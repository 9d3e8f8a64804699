"""What becomes of guesses tells how likely the next ones are."""

from __future__ import annotations

import pytest

from workers.decoding.chances import Chance, TreeChances


def test_a_chance_starts_with_that_of_all_and_becomes_its_own() -> None:
    everyone = Chance()
    assert everyone.value == 0.5
    for _ in range(50):
        Chance(everyone).observe(4, 4)
    assert everyone.value > 0.9
    mine = Chance(everyone)
    assert mine.value == pytest.approx(everyone.value)
    for _ in range(20):
        mine.observe(4, 0)
    assert mine.value < 0.2


def test_a_guess_after_a_wrong_one_says_nothing() -> None:
    chance = Chance()
    chance.observe(8, 1)
    assert chance.value == pytest.approx((1 + 2 * 0.5) / (1 + 1 + 2))  # one right, one wrong, six unknown


def test_of_a_tree_each_guess_has_its_own_chance() -> None:
    chances = TreeChances()
    assert chances.values(3) == [0.5, 0.25, 0.125]
    for _ in range(200):
        chances.observe(3, (0, 2))
    first, second, third, fourth = chances.values(4)
    assert first == pytest.approx(third, abs=0.02) and first > 0.95 and second < 0.02
    assert fourth == third / 2  # never tried
