"""Guesses by a draft model: which tokens it has still to read, of which blocks it has keys and values.

    known     the first `num_known` tokens of a sequence have the draft model's keys and values in its blocks
    guesses   what it proposed after them; it has keys and values of all of these but the last

It reads a sequence when guesses are wanted of it and not before: while none pay, it costs nothing, and what
it has missed is read when they do again, a limited number of tokens a step. Full blocks that it has read are
known by their generation, whoever takes them from the prefix cache later; blocks that came from another
group, or were given out anew, are not.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Sequences

from workers.engine.block_pool import BlockPool
from workers.engine.proposals import DraftModel, DraftTask, Proposals
from workers.engine.sequence import Sequence

# Rows of a sequence in a pass that guesses: the newest token, and a right guess before it. A pass with more
# has read what was missed, once, and does not say how long guesses take.
GUESSING_ROWS = 2
_MOST_READ = 512  # tokens a step, of all sequences together
_NEVER = -1  # no block has this generation


class DraftProgress:
    """How far the draft model knows a sequence that has blocks."""

    __slots__ = ("guesses", "num_full", "num_known")

    def __init__(self, num_known: int, num_full: int) -> None:
        self.num_known = num_known  # tokens
        self.num_full = num_full  # blocks, the first ones, that are marked as read
        self.guesses: tuple[int, ...] = ()


class ModelGuesses:
    """Of one engine; `workers.engine.drafting.Guesses`."""

    def __init__(self, model: DraftModel, pool: BlockPool, block_size: int) -> None:
        self._model = model
        self._pool = pool
        self._block_size = block_size
        self._read = array("q", [_NEVER]) * pool.num_blocks  # the generation of each block when it was read

    def limits(self, sequences: Sequences[Sequence], most: Sequences[int]) -> list[int]:
        """As many as are allowed, as far as the draft model can read."""
        longest = self._model.max_tokens
        return [max(0, min(m, longest - s.num_tokens)) for s, m in zip(sequences, most, strict=True)]

    def unread(self, sequences: Sequences[Sequence]) -> list[int]:
        """All but the newest token, and a right guess before it. Before the first guess of a sequence its
        blocks are looked at anew each time: others with the same prompt may have read them."""
        counts = []
        for sequence in sequences:
            if sequence.draft_progress is None:
                known = self._num_read(sequence.block_table) * self._block_size
                start = min(known, sequence.num_tokens - 1)
            else:
                start = self._settle(sequence)
            missing = sequence.num_tokens - start
            counts.append(missing if missing > GUESSING_ROWS else 0)
        return counts

    def guess(self, sequences: Sequences[Sequence], lengths: Sequences[int]) -> Proposals:
        """None of a sequence of which too much is still to be read: the rest is read in the next steps."""
        left = _MOST_READ
        tasks: list[DraftTask] = []
        asked: list[int] = []
        for index, (sequence, length) in enumerate(zip(sequences, lengths, strict=True)):
            if length == 0 or left == 0:
                continue
            start = self._settle(sequence)
            end = min(sequence.num_tokens, start + left)
            left -= end - start
            asked.append(index)
            tasks.append(
                DraftTask(
                    token_ids=sequence.tokens(start, end),
                    start=start,
                    block_table=sequence.block_table,
                    num_drafts=length if end == sequence.num_tokens else 0,
                )
            )
        drafts: list[tuple[int, ...]] = [()] * len(sequences)
        if not tasks:
            return Proposals(drafts)
        proposals = self._model.propose(tasks)
        for index, task, found in zip(asked, tasks, proposals.drafts, strict=True):
            drafts[index] = sequences[index].allowed(found)
            self._advance(sequences[index], task.start + len(task.token_ids), found)
        return Proposals(drafts, proposals.passes, is_broken=proposals.is_broken)

    def note_checked(self, sequence: Sequence, sampled: Sequences[int]) -> None:
        """What came true is seen in the tokens when the next guesses are wanted."""

    def _settle(self, sequence: Sequence) -> int:
        """Tokens that need not be read: all that are known but for the newest one, after which it guesses."""
        progress = sequence.draft_progress
        if progress is None:
            num_full = self._num_read(sequence.block_table)
            progress = sequence.draft_progress = DraftProgress(num_full * self._block_size, num_full)
        start = progress.num_known
        came = sequence.tokens(start, min(sequence.num_tokens, start + len(progress.guesses)))
        for guess, token_id in zip(progress.guesses[:-1], came, strict=False):
            if guess != token_id:
                break
            progress.num_known += 1
        progress.guesses = ()
        return min(progress.num_known, sequence.num_tokens - 1)

    def _advance(self, sequence: Sequence, num_known: int, guesses: tuple[int, ...]) -> None:
        progress = sequence.draft_progress
        assert progress is not None, "settled before it was read"
        progress.num_known, progress.guesses = num_known, guesses
        for block in sequence.block_table[progress.num_full : num_known // self._block_size]:
            self._read[block] = self._pool.generations[block]
            progress.num_full += 1

    def _num_read(self, block_table: Sequences[int]) -> int:
        generations = self._pool.generations
        for index, block in enumerate(block_table):
            if self._read[block] != generations[block]:
                return index
        return len(block_table)
