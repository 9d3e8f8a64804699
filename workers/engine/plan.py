"""From what the scheduler has decided to the plan of a step."""

from __future__ import annotations

from collections.abc import Sequence as Items
from itertools import chain
from typing import NamedTuple

from workers.engine.block_pool import BlockPool
from workers.engine.search import search_of
from workers.engine.sequence import Sequence, SequenceState
from workers.engine.step import SequenceSlice, StepPlan


class ScheduledStep(NamedTuple):
    """A plan and, in the same order, the sequences of its slices: first `sequences`, then `searches`."""

    plan: StepPlan
    sequences: list[Sequence]  # those that sample
    num_decoding: int  # the first of them; the others are in prefill
    searches: list[Sequence]  # beam searches: one with its prompt, or once for each hypothesis
    num_decode_rows: int  # slices of a newest token, in all

    def note_admitted(self, now_s: float) -> None:
        """It is the first step of those that were in none before."""
        if self.num_decode_rows < len(self.plan.slices):
            for sequence in chain(self.sequences[self.num_decoding :], self.searches):
                if sequence.parent.admitted_s is None:
                    sequence.parent.admitted_s = now_s


def plan_step(
    number: int,
    decoding: Items[Sequence],
    decode_slices: Items[SequenceSlice],
    chunks: Items[tuple[Sequence, int]],
    searching: Items[Sequence],
    pool: BlockPool,
    *,
    turns_by_length: bool,
) -> ScheduledStep | None:
    """decode_slices: of those in `decoding`, one each. chunks: of sequences in prefill, with the position
    where each ends; those that were preempted after their turn are left out. turns_by_length: the model has
    to know how long sequences are. None when there is nothing to compute."""
    slices, sequences = [*decode_slices], [*decoding]
    searches: list[Sequence] = []
    search_slices: list[SequenceSlice] = []
    for sequence, end in chunks:
        if sequence.state is SequenceState.PREFILLING:
            is_sampling = sequence.search is None
            piece = sequence.chunk_slice(end, turns_by_length=turns_by_length)
            (slices if is_sampling else search_slices).append(piece)
            (sequences if is_sampling else searches).append(sequence)
    copies: list[tuple[int, int]] = []
    num_decode_rows = len(decoding)
    for sequence in searching:
        search = search_of(sequence)
        rows = search.slices(sequence)
        search_slices += rows
        searches += [sequence] * len(rows)
        copies += search.copies
        num_decode_rows += len(rows)
    slices += search_slices
    if not slices:
        return None
    plan = StepPlan(
        number=number,
        slices=slices,
        num_searches=len(search_slices),
        zero_blocks=pool.take_zero_blocks(),
        copy_blocks=copies,
    )
    return ScheduledStep(plan, sequences, len(decoding), searches, num_decode_rows)
