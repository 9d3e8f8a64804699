"""What models beside the served one are asked for when tokens are to be guessed, and what they answer.

A draft model keeps keys and values of its own in blocks with the numbers of the served model's: a block table
serves both. A task is complete in itself, as a step's plan: nothing but that second pool is kept between two.
Heads keep nothing but what the last step has left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from workers.decoding.copies import Copied


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTask:
    """Tokens of one sequence that the draft model is to compute, and how many it is to guess after them."""

    token_ids: Sequence[int]  # never empty; up to the newest one when guesses are wanted
    start: int  # position of the first one = tokens whose draft keys and values are in their blocks
    block_table: Sequence[int]  # of all positions to write: 0 .. start + len(token_ids) + num_drafts - 2
    num_drafts: int  # 0: the tokens are only to be known


class HeadTask(NamedTuple):
    """The row of the last step that a sequence's newest token came from, and how many to guess after it."""

    slice: int  # of the step's plan
    row: int  # of those after which the slice sampled
    token_id: int  # that was sampled there
    num_drafts: int
    is_chain: bool = False  # one guess a place
    copied: Copied = Copied()  # to be guessed, too, in a tree


class Pass(NamedTuple):
    """One run of what guesses."""

    num_rows: int
    seconds: float


class Proposals(NamedTuple):
    """Guesses, and what it took to make them."""

    drafts: Sequence[tuple[int, ...]]  # one a task, maybe fewer than wanted
    passes: Sequence[Pass] = ()
    parents: Sequence[tuple[int, ...] | None] = ()  # of trees, as in `SequenceSlice`; (): there is none
    is_broken: bool = False  # values came up that are not finite: there is nothing after those


class DraftModel(Protocol):
    """The draft model of a group; on rank 0."""

    @property
    def max_tokens(self) -> int:
        """The longest context that it can read."""
        ...

    def propose(self, tasks: Sequence[DraftTask]) -> Proposals:
        """Computes the tokens of all tasks and guesses what comes after each, the best token after the best
        one. Of the last guess of a task it has no keys and values, of all others it has."""
        ...


class DraftHeads(Protocol):
    """Heads that read the last hidden states of a group's steps; on rank 0."""

    @property
    def num_heads(self) -> int:
        """How many next tokens they guess, each for one place."""
        ...

    def propose(self, step_number: int, tasks: Sequence[HeadTask]) -> Proposals:
        """A tree of the best tokens of the heads for each task, or a chain of the best token of each head. No
        guesses unless `step_number` is that of the last step."""
        ...
