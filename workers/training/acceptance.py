"""How many guesses the engine would accept along a known greedy answer: counted, not estimated.

A step knows the answer up to its newest token n, checks guesses for the tokens n + 1, n + 2, ... and goes on
behind the first wrong one with the token that the model says there. So whether the step at n accepts k
guesses depends on n alone, and a walk over the answer meets exactly the steps of the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """Steps over one or more answers."""

    num_steps: int
    num_tokens: int  # that they brought; none behind the end of an answer

    @property
    def tokens_per_step(self) -> float:
        """1.0 when nothing is accepted."""
        return self.num_tokens / self.num_steps if self.num_steps else 1.0


def walk(right: Sequence[torch.Tensor], num_guesses: int) -> Walk:
    """right: of each answer (tokens, guesses): whether the guess i made at token n is token n + 1 + i. What
    lies behind the end is never right. The first token of an answer comes with the prompt and is no step."""
    num_steps, num_tokens = 0, 0
    for answer in right:
        rows = answer[:, :num_guesses].tolist()
        newest, last = 0, len(rows) - 1
        while newest < last:
            accepted = next((i for i, is_right in enumerate(rows[newest]) if not is_right), len(rows[newest]))
            reached = min(newest + accepted + 1, last)
            num_steps, num_tokens = num_steps + 1, num_tokens + reached - newest
            newest = reached
    return Walk(num_steps=num_steps, num_tokens=num_tokens)


def right_from_agreement(agrees: torch.Tensor, num_guesses: int) -> torch.Tensor:
    """(tokens, num_guesses) for `walk`, of a model that guesses token by token.

    agrees: (tokens,), whether it says token j after the true tokens before j. A guess behind right ones has
    read the true tokens, and one behind a wrong one does not count: so no guess needs to be made in a loop.
    """
    right = torch.zeros(len(agrees), num_guesses, dtype=torch.bool)
    for guess in range(num_guesses):
        right[: max(0, len(agrees) - 1 - guess), guess] = agrees[1 + guess :]
    return right
