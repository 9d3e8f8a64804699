"""Guesses of the next tokens for the sequences in decode, and what becomes of them.

A step computes the guessed tokens behind the newest one and samples after each of them, every row with the
random number of its own position (`workers.runtime.philox`). As long as what is sampled is what was guessed,
the next row is the one that a step of its own would have had. So the answer is the same, token by token, as
without guesses, greedy or not: a guess is accepted with exactly the probability that the model gives it
(rejection sampling for a draft that is certain, Leviathan et al. 2023 and Chen et al. 2023).
"""

from __future__ import annotations

from collections.abc import Sequence as Sequences

from workers.config import SpeculativeConfig
from workers.decoding.drafter import Drafter, drafter_of
from workers.decoding.governor import Chance, Governor
from workers.engine.block_pool import BlockPool
from workers.engine.sequence import Sequence


class DraftState:
    """What is known of one sequence's guesses."""

    __slots__ = ("chance", "drafter")

    def __init__(self, drafter: Drafter, all_chances: Chance) -> None:
        self.drafter = drafter
        self.chance = Chance(all_chances)


class Drafting:
    """Of one engine; used by its thread."""

    def __init__(self, config: SpeculativeConfig, pool: BlockPool, block_size: int) -> None:
        self._method = config.method
        self._max_drafts = config.max_draft_tokens
        self._pool = pool
        self._block_size = block_size
        self._governor = Governor()

    def start(self, decoding: Sequences[Sequence], max_rows: int) -> None:
        """Gives each sequence the guesses to check in the next step, all rows together at most `max_rows`,
        and blocks for them as far as they are there without taking them from anybody."""
        chances = [self._state(sequence).chance.value for sequence in decoding]
        if not self._governor.is_worth_looking(chances, self._max_drafts, max_rows):
            return
        proposed = [self._propose(sequence) for sequence in decoding]
        lengths = self._governor.lengths(chances, [len(drafts) for drafts in proposed], max_rows)
        for sequence, drafts, length in zip(decoding, proposed, lengths, strict=True):
            table, start = sequence.block_table, sequence.num_computed + 1
            missing = -(-(start + length) // self._block_size) - len(table)
            for _ in range(min(missing, self._pool.num_available)):
                table.append(self._pool.allocate())
            sequence.drafts = drafts[: min(length, len(table) * self._block_size - start)]

    def end(self, sequence: Sequence, sampled: Sequences[int], num_right: int) -> None:
        """`sampled`: what the model said after its newest token and each of its guesses, of which the first
        `num_right` were right and are computed tokens now. Blocks that hold nothing but the others are given
        back."""
        state = self._state(sequence)
        state.chance.observe(len(sequence.drafts), num_right)
        state.drafter.note_checked(sequence.drafts, sampled)
        sequence.drafts = ()
        table, needed = sequence.block_table, -(-sequence.num_computed // self._block_size)
        while len(table) > needed:
            self._pool.free(table.pop())

    def note_step(self, num_rows: int, seconds: float) -> None:
        """A step that only decoded."""
        self._governor.observe(num_rows, seconds)

    def _propose(self, sequence: Sequence) -> tuple[int, ...]:
        # The token after the last guess is one of those that are left.
        left = sequence.max_num_tokens - sequence.num_tokens - 1
        drafter = self._state(sequence).drafter
        drafter.extend(sequence.tokens(drafter.num_tokens, sequence.num_tokens))
        drafts = drafter.propose(min(self._max_drafts, left))
        if sequence.grammar is not None and drafts:
            return drafts[: sequence.grammar.num_allowed(drafts)]
        return drafts

    def _state(self, sequence: Sequence) -> DraftState:
        if sequence.drafting is None:
            sequence.drafting = DraftState(drafter_of(self._method), self._governor.chance)
        return sequence.drafting


def drafting_of(config: SpeculativeConfig | None, pool: BlockPool, block_size: int) -> Drafting | None:
    """None when nothing is to be guessed. Raises ValueError for a config that nobody has checked."""
    if config is None or config.method == "none":
        return None
    drafter_of(config.method)  # raises for one that there is not
    if config.max_draft_tokens < 1:
        raise ValueError(f"speculative.max_draft_tokens is {config.max_draft_tokens}: it must be at least 1")
    return Drafting(config, pool, block_size)
