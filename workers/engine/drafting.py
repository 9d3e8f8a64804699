"""Guesses of the next tokens for the sequences in decode, and what becomes of them.

A step computes the guessed tokens behind the newest one and samples after each of them, every row with the
random number of its own position (`workers.runtime.philox`). As long as what is sampled is what was guessed,
the next row is the one that a step of its own would have had. So the answer is the same, token by token, as
without guesses, greedy or not: a guess is accepted with exactly the probability that the model gives it
(rejection sampling for a draft that is certain, Leviathan et al. 2023 and Chen et al. 2023).
"""

from __future__ import annotations

from collections.abc import Sequence as Sequences
from typing import Protocol

from workers.config import SpeculativeConfig
from workers.decoding.drafter import DRAFT_MODEL, MEDUSA, Drafter, drafter_of
from workers.decoding.governor import Chance, Governor
from workers.decoding.guess_tree import depth_of
from workers.engine.block_pool import BlockPool
from workers.engine.head_guesses import HeadGuesses
from workers.engine.model_guesses import ModelGuesses
from workers.engine.proposals import Proposals
from workers.engine.request import EngineLimits
from workers.engine.sequence import SampledAt, Sequence
from workers.engine.step import Executor

# Rows of a sequence in a pass that guesses: the newest token, and a right guess before it. A pass with more
# has read what was missed, once, and does not say how long guesses take.
_MOST_GUESSING = 2


class DraftState:
    """What is known of one sequence's guesses."""

    __slots__ = ("chance", "drafter")

    def __init__(self, all_chances: Chance) -> None:
        self.chance = Chance(all_chances)
        self.drafter: Drafter | None = None  # of a method that guesses from the tokens alone


class Guesses(Protocol):
    """A way of guessing, for all sequences of an engine."""

    def limits(self, sequences: Sequences[Sequence], most: Sequences[int]) -> list[int]:
        """How many there can be of each sequence, of which `most` are wanted at most."""
        ...

    def guess(self, sequences: Sequences[Sequence], lengths: Sequences[int]) -> Proposals:
        """Up to `lengths` of each sequence, whose blocks are there. Called after `limits` of the same."""
        ...

    def note_checked(self, sequence: Sequence, sampled: Sequences[int]) -> None:
        """The model has been given the newest token and `sequence.drafts`, and has said one more token after
        each; the sequence has not heard of them."""
        ...


class TextGuesses:
    """From the tokens of each sequence alone."""

    def __init__(self, method: str, all_chances: Chance) -> None:
        self._method = method
        self._all_chances = all_chances
        self._found: list[tuple[int, ...]] = []

    def limits(self, sequences: Sequences[Sequence], most: Sequences[int]) -> list[int]:
        self._found = [self._propose(*pair) for pair in zip(sequences, most, strict=True)]
        return list(map(len, self._found))

    def guess(self, sequences: Sequences[Sequence], lengths: Sequences[int]) -> Proposals:
        return Proposals([found[:length] for found, length in zip(self._found, lengths, strict=True)])

    def note_checked(self, sequence: Sequence, sampled: Sequences[int]) -> None:
        self._drafter(sequence).note_checked(sequence.drafts, sampled)

    def _propose(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        drafter = self._drafter(sequence)
        drafter.extend(sequence.tokens(drafter.num_tokens, sequence.num_tokens))
        return sequence.allowed(drafter.propose(most))

    def _drafter(self, sequence: Sequence) -> Drafter:
        state = _state(sequence, self._all_chances)
        if state.drafter is None:
            state.drafter = drafter_of(self._method)
        return state.drafter


class Drafting:
    """Of one engine; used by its thread."""

    def __init__(
        self,
        guesses: Guesses,
        governor: Governor,
        pool: BlockPool,
        block_size: int,
        max_drafts: int,
        recompute_past: int | None = None,
    ) -> None:
        """recompute_past: as `EngineLimits`; no step with guesses goes past it."""
        self._guesses = guesses
        self._max_drafts = max_drafts
        self._pool = pool
        self._block_size = block_size
        self._governor = governor
        self._recompute_past = recompute_past
        self._guessing_s = 0.0  # of the step
        self.reads_blocks = isinstance(guesses, ModelGuesses)  # all of a sequence's, beside the model

    def start(self, decoding: Sequences[Sequence], max_rows: int) -> None:
        """Gives each sequence the guesses to check in the next step, all rows together at most `max_rows`,
        and blocks for them as far as they are there without taking them from anybody."""
        self._guessing_s = 0.0
        chances = [_state(sequence, self._governor.chance).chance.value for sequence in decoding]
        if not self._governor.is_worth_looking(chances, self._max_drafts, max_rows):
            return
        # The token after the last guess is one of those that are left.
        most = [min(self._max_drafts, s.max_num_tokens - s.num_tokens - 1) for s in decoding]
        if (end := self._recompute_past) is not None:
            ends = [
                end - s.num_tokens if s.num_tokens <= end else m for s, m in zip(decoding, most, strict=True)
            ]
            most = list(map(min, most, ends))
        limits = self._guesses.limits(decoding, most)
        lengths = self._governor.lengths(chances, limits, max_rows)
        lengths = [self._reserve(*pair) for pair in zip(decoding, lengths, strict=True)]
        proposals = self._guesses.guess(decoding, lengths)
        for index, (sequence, drafts) in enumerate(zip(decoding, proposals.drafts, strict=True)):
            sequence.drafts = drafts
            sequence.draft_parents = proposals.parents[index] if drafts and proposals.parents else None
            self._trim(sequence, sequence.num_computed + 1 + len(sequence.drafts))
        self._guessing_s = sum(each.seconds for each in proposals.passes)
        most_rows = _MOST_GUESSING * sum(length > 0 for length in lengths)
        for num_rows, seconds in proposals.passes:
            if num_rows <= most_rows:
                self._governor.observe_pass(num_rows, seconds)

    def end(self, sequence: Sequence, place: SampledAt, sampled: Sequences[int], num_right: int) -> None:
        """`sampled`: what the model said after its newest token and each of its guesses, of which the first
        `num_right` were right and are computed tokens now; of a tree, on the way that came true. Blocks that
        hold nothing but the others are given back. `place`: where the newest token was sampled."""
        sequence.sampled_at = place
        if not sequence.drafts:
            return
        drafts = sequence.drafts
        parents = sequence.draft_parents or tuple(range(-1, len(drafts) - 1))
        num_checked, last_right = depth_of(parents), place.row - 1
        steps, newest = list(zip(parents, drafts, strict=True)), (last_right, sampled[num_right])
        if newest in steps:  # it ended the answer: right, but no computed token
            last_right = steps.index(newest)
            num_checked = num_right = num_right + 1
        _state(sequence, self._governor.chance).chance.observe(num_checked, num_right)
        self._governor.observe_tree(parents, last_right)
        self._guesses.note_checked(sequence, sampled)
        sequence.drafts, sequence.draft_parents = (), None
        self._trim(sequence, sequence.num_computed)

    def note_step(self, num_rows: int, seconds: float) -> None:
        """A step that only decoded, with the time for its guesses."""
        self._governor.observe(num_rows, seconds - self._guessing_s)

    def _reserve(self, sequence: Sequence, length: int) -> int:
        """Blocks for so many guesses, as far as there are any; returns for how many."""
        table, start = sequence.block_table, sequence.num_computed + 1
        missing = -(-(start + length) // self._block_size) - len(table)
        for _ in range(min(missing, self._pool.num_available)):
            table.append(self._pool.allocate())
        return min(length, len(table) * self._block_size - start)

    def _trim(self, sequence: Sequence, num_tokens: int) -> None:
        table, needed = sequence.block_table, -(-num_tokens // self._block_size)
        while len(table) > needed:
            self._pool.free(table.pop())


def drafting_of(
    config: SpeculativeConfig | None,
    pool: BlockPool,
    block_size: int,
    executor: Executor,
    limits: EngineLimits,
) -> Drafting | None:
    """None when nothing is to be guessed. Raises ValueError for a config that nobody has checked, and where
    the executor lacks what it needs."""
    if config is None or config.method == "none":
        return None
    if config.max_draft_tokens < 1:
        raise ValueError(f"speculative.max_draft_tokens is {config.max_draft_tokens}: it must be at least 1")
    governor = Governor()
    guesses: Guesses
    if config.method == DRAFT_MODEL:
        if executor.draft_model is None:
            raise ValueError("speculative.method is draft_model, but this group has loaded no draft model")
        guesses = ModelGuesses(executor.draft_model, pool, block_size)
    elif config.method == MEDUSA:
        if executor.draft_heads is None:
            raise ValueError("speculative.method is medusa, but this group has loaded no heads")
        governor = Governor(has_trees=True)
        guesses = HeadGuesses(executor.draft_heads)
    else:
        drafter_of(config.method)  # raises for one that there is not
        guesses = TextGuesses(config.method, governor.chance)
    return Drafting(guesses, governor, pool, block_size, config.max_draft_tokens, limits.recompute_past)


def _state(sequence: Sequence, all_chances: Chance) -> DraftState:
    if sequence.drafting is None:
        sequence.drafting = DraftState(all_chances)
    return sequence.drafting
