"""Plans of steps as the toy executor takes them: copies that no later step changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from workers.engine.step import SequenceSlice, StepPlan


def snapshot(plan: StepPlan) -> StepPlan:
    """A plan as it is now."""
    return StepPlan(
        number=plan.number,
        slices=tuple(_copy(piece) for piece in plan.slices),
        num_searches=plan.num_searches,
        zero_blocks=tuple(plan.zero_blocks),
        copy_blocks=tuple(plan.copy_blocks),
    )


def filled_in(piece: SequenceSlice, drawn: Sequence[int]) -> SequenceSlice:
    """With the ids that the step before has drawn."""
    if piece.token_ids[0] >= 0:
        return piece
    (placeholder,) = piece.token_ids
    return replace(piece, token_ids=(drawn[-1 - placeholder],))


def _copy(piece: SequenceSlice) -> SequenceSlice:
    """A slice as it was in its step: tables and outputs are live lists."""
    task = piece.sample
    return SequenceSlice(
        token_ids=tuple(piece.token_ids),
        start=piece.start,
        block_table=tuple(piece.block_table),
        sample=task and replace(task, output_token_ids=tuple(task.output_token_ids)),
        num_known=piece.num_known,
        num_drafts=piece.num_drafts,
        draft_parents=piece.draft_parents,
        prompt_targets=piece.prompt_targets,
        num_prompt_logprobs=piece.num_prompt_logprobs,
    )
