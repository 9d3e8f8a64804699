"""Counted by hand."""

from __future__ import annotations

import pytest
import torch

from workers.training.acceptance import Walk, right_from_agreement, walk

# Token 0 comes with the prompt. At 0 two guesses are right: 1, 2 and the model's own 3. At 3 the first is
# wrong: 4. At 4 one is right: 5 and the model's own 6. At 6 all that is left is right: 7, the last one.
ANSWER = torch.tensor(
    [[1, 1, 0], [1, 1, 1], [1, 1, 1], [0, 1, 1], [1, 0, 0], [1, 1, 1], [1, 0, 0], [0, 0, 0]], dtype=torch.bool
)


@pytest.mark.parametrize(
    ("num_guesses", "expected"),
    [
        (0, Walk(num_steps=7, num_tokens=7)),
        (1, Walk(num_steps=4, num_tokens=7)),  # 0 -> 2 -> 4 -> 6 -> 7
        (2, Walk(num_steps=4, num_tokens=7)),  # 0 -> 3 -> 4 -> 6 -> 7
        (3, Walk(num_steps=4, num_tokens=7)),
    ],
)
def test_a_walk_meets_the_steps_of_the_engine(num_guesses: int, expected: Walk) -> None:
    assert walk([ANSWER], num_guesses) == expected


def test_answers_are_walked_one_after_the_other() -> None:
    assert walk([ANSWER, ANSWER[:1], ANSWER], 2) == Walk(num_steps=8, num_tokens=14)
    assert walk([], 2).tokens_per_step == 1.0


def test_nothing_is_counted_behind_the_end() -> None:
    all_right = torch.tensor([[1, 1], [1, 0], [0, 0]], dtype=torch.bool)
    assert walk([all_right], 2) == Walk(num_steps=1, num_tokens=2)


def test_agreement_becomes_guesses() -> None:
    agrees = torch.tensor([True, True, False, True, True])
    assert right_from_agreement(agrees, 3).tolist() == [
        [True, False, True],
        [False, True, True],
        [True, True, False],
        [True, False, False],
        [False, False, False],
    ]
    assert walk([right_from_agreement(agrees, 2)], 2) == Walk(num_steps=2, num_tokens=4)
