"""Guesses by heads that read the last hidden states of the rows that the newest tokens came from, and of what
came after the same tokens before: each knows what the other does not."""

from __future__ import annotations

from collections.abc import Sequence as Sequences

from workers.decoding.chances import Chance
from workers.decoding.copies import Copied, Copies
from workers.engine.proposals import DraftHeads, HeadTask, Proposals
from workers.engine.sequence import Sequence


class HeadGuesses:
    """Of one engine; `workers.engine.drafting.Guesses`."""

    def __init__(self, heads: DraftHeads) -> None:
        self._heads = heads
        self._copy_chance = Chance()  # of all sequences

    def limits(self, sequences: Sequences[Sequence], most: Sequences[int]) -> list[int]:
        """One a head with a grammar, which follows one way; else as many as are wanted, in a tree."""
        num_heads = self._heads.num_heads
        return [
            0 if s.sampled_at is None else m if s.grammar is None else min(m, num_heads)
            for s, m in zip(sequences, most, strict=True)
        ]

    def unread(self, sequences: Sequences[Sequence]) -> None:
        """Nothing is: heads look at what the step before has left."""

    def guess(self, sequences: Sequences[Sequence], lengths: Sequences[int]) -> Proposals:
        """None for one that was not in the last step."""
        drafts: list[tuple[int, ...]] = [()] * len(sequences)
        parents: list[tuple[int, ...] | None] = [None] * len(sequences)
        newest = max((s.sampled_at.step for s in sequences if s.sampled_at is not None), default=0)
        asked: list[int] = []
        tasks: list[HeadTask] = []
        for index, (sequence, length) in enumerate(zip(sequences, lengths, strict=True)):
            place = sequence.sampled_at
            if length > 0 and place is not None and place.step == newest:
                asked.append(index)
                is_chain = sequence.grammar is not None
                copied = Copied() if is_chain else self._copied(sequence, length)
                tasks.append(HeadTask(place.slice, place.row, sequence.output[-1], length, is_chain, copied))
        if not tasks:
            return Proposals(drafts)
        proposals = self._heads.propose(newest, tasks)
        for index, found in zip(asked, proposals.drafts, strict=True):
            drafts[index] = sequences[index].allowed(found)
        for index, follows in zip(asked, proposals.parents, strict=False):
            parents[index] = follows
        return Proposals(drafts, proposals.passes, parents, proposals.is_broken)

    def note_checked(self, sequence: Sequence, sampled: Sequences[int]) -> None:
        """What is copied learns from the tokens as they come."""

    def _copied(self, sequence: Sequence, most: int) -> Copied:
        if sequence.copies is None:
            sequence.copies = Copies(self._copy_chance)
        copies = sequence.copies
        copies.extend(sequence.tokens(copies.num_tokens, sequence.num_tokens))
        return copies.propose(most)
