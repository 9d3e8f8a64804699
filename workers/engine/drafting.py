"""Guesses of the next tokens for the sequences in decode, and what becomes of them.

A step computes the guessed tokens behind the newest one and samples after each of them, every row with the
random number of its own position (`workers.runtime.philox`). As long as what is sampled is what was guessed,
the next row is the one that a step of its own would have had. So the answer is the same, token by token, as
without guesses, greedy or not: a guess is accepted with exactly the probability that the model gives it
(rejection sampling for a draft that is certain, Leviathan et al. 2023 and Chen et al. 2023).
"""

from __future__ import annotations

from collections.abc import Sequence as Sequences
from typing import NamedTuple, Protocol

from workers.config import ScheduleConfig, SpeculativeConfig
from workers.decoding.chances import Chance
from workers.decoding.drafter import DRAFT_MODEL, MEDUSA
from workers.decoding.governor import Governor, Unread
from workers.decoding.guess_tree import depth_of
from workers.engine.block_pool import BlockPool
from workers.engine.demand import OutputLengthEstimate
from workers.engine.guess_failures import GuessFailures
from workers.engine.head_guesses import HeadGuesses
from workers.engine.model_guesses import GUESSING_ROWS, ModelGuesses
from workers.engine.proposals import Proposals
from workers.engine.request import EngineLimits
from workers.engine.sequence import SampledAt, Sequence
from workers.engine.step import Executor
from workers.engine.text_guesses import TextGuesses


class Guesses(Protocol):
    """A way of guessing, for all sequences of an engine."""

    def limits(self, sequences: Sequences[Sequence], most: Sequences[int]) -> list[int]:
        """How many there can be of each sequence, of which `most` are wanted at most."""
        ...

    def unread(self, sequences: Sequences[Sequence]) -> list[int] | None:
        """Tokens of each that have to be read before its first guess; None: never any."""
        ...

    def guess(self, sequences: Sequences[Sequence], lengths: Sequences[int]) -> Proposals:
        """Up to `lengths` of each sequence, whose blocks are there. Called after `limits` of the same."""
        ...

    def note_checked(self, sequence: Sequence, sampled: Sequences[int]) -> None:
        """The model has been given the newest token and `sequence.drafts`, and has said one more token after
        each; the sequence has not heard of them."""
        ...


class Bounds(NamedTuple):
    """Where guesses end."""

    max_drafts: int  # of a sequence in a step
    recompute_past: int | None  # as `EngineLimits`; no step with guesses goes past it
    # Tokens that a step may have, but not one pass (`EngineLimits.max_pass_rows`): with guesses there, the
    # whole step would be computed twice.
    beyond_pass: int


class Drafting:
    """Of one engine; used by its thread."""

    def __init__(
        self, guesses: Guesses, governor: Governor, pool: BlockPool, block_size: int, bounds: Bounds
    ) -> None:
        self._guesses = guesses
        self._governor = governor
        self._pool = pool
        self._block_size = block_size
        self._bounds = bounds
        self._guessing_s = 0.0  # of the step
        self.failures = GuessFailures()
        self.reads_blocks = isinstance(guesses, ModelGuesses)  # all of a sequence's, beside the model

    def start(self, decoding: Sequences[Sequence], budget: int, estimate: OutputLengthEstimate) -> None:
        """Gives each sequence the guesses to check in the next step, and blocks for them as far as they are
        there without taking them from anybody. budget: tokens of the step that nobody has taken."""
        self._guessing_s = 0.0
        if self.failures.is_off:
            return
        max_rows = len(decoding) + budget - self._bounds.beyond_pass
        chances = [self._chance_of(sequence).value for sequence in decoding]
        if not self._governor.is_worth_looking(chances, self._bounds.max_drafts, max_rows):
            return
        lengths = self._lengths(decoding, chances, max_rows, estimate)
        if not any(lengths):
            return
        proposals = Proposals([()] * len(decoding))
        with self.failures.caught():
            proposals = self._guesses.guess(decoding, lengths)
            if proposals.is_broken:
                self.failures.note_not_finite()
            else:
                self.failures.note_success()
        for index, (sequence, drafts) in enumerate(zip(decoding, proposals.drafts, strict=True)):
            sequence.drafts = drafts
            sequence.draft_parents = proposals.parents[index] if drafts and proposals.parents else None
            self._trim(sequence, sequence.num_computed + 1 + len(sequence.drafts))
        self._guessing_s = sum(each.seconds for each in proposals.passes)
        most_rows = GUESSING_ROWS * sum(length > 0 for length in lengths)
        for num_rows, seconds in sorted(proposals.passes):  # what a guess takes is known first
            if num_rows <= most_rows:
                self._governor.observe_pass(num_rows, seconds)
            else:
                self._governor.observe_reading(num_rows, seconds)

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
        if sequence.draft_parents is None:
            num_checked = min(num_checked, len(sampled) - 1)
        steps, newest = list(zip(parents, drafts, strict=True)), (last_right, sampled[num_right])
        if newest in steps:  # it ended the answer: right, but no computed token
            last_right = steps.index(newest)
            num_checked = num_right = num_right + 1
        self._chance_of(sequence).observe(num_checked, num_right)
        self._governor.observe_tree(parents, last_right)
        self._guesses.note_checked(sequence, sampled)
        sequence.drafts, sequence.draft_parents = (), None
        self._trim(sequence, sequence.num_computed)

    def note_step(self, num_rows: int, seconds: float) -> None:
        """A step that only decoded, with the time for its guesses."""
        self._governor.observe(num_rows, seconds - self._guessing_s)

    def _lengths(
        self,
        decoding: Sequences[Sequence],
        chances: Sequences[float],
        max_rows: int,
        estimate: OutputLengthEstimate,
    ) -> list[int]:
        """Guesses to make of each sequence, with blocks for them."""
        # The token after the last guess is one of those that are left.
        most = [min(self._bounds.max_drafts, s.max_num_tokens - s.num_tokens - 1) for s in decoding]
        if (end := self._bounds.recompute_past) is not None:
            ends = [
                end - s.num_tokens if s.num_tokens <= end else m for s, m in zip(decoding, most, strict=True)
            ]
            most = list(map(min, most, ends))
        limits = [0] * len(decoding)
        unread: list[Unread] | None = None
        with self.failures.caught():
            found = self._guesses.limits(decoding, most)
            if (counts := self._guesses.unread(decoding)) is not None:
                left = map(estimate.expected_left, decoding)
                unread = [Unread(*pair) for pair in zip(counts, left, strict=True)]
            limits = found  # now nothing has failed; else nothing is guessed
        lengths = self._governor.lengths(chances, limits, max_rows, unread)
        return [self._reserve(*pair) for pair in zip(decoding, lengths, strict=True)]

    def _chance_of(self, sequence: Sequence) -> Chance:
        if sequence.chance is None:
            sequence.chance = Chance(self._governor.chance)
        return sequence.chance

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
    schedule: ScheduleConfig,
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
        guesses = TextGuesses(config.method)
    bounds = Bounds(
        max_drafts=config.max_draft_tokens,
        recompute_past=limits.recompute_past,
        beyond_pass=max(0, schedule.max_step_tokens - (limits.max_pass_rows or schedule.max_step_tokens)),
    )
    return Drafting(guesses, governor, pool, block_size, bounds)
