"""From a plan to the message that all ranks compute."""

from __future__ import annotations

from workers.engine.step import StepPlan
from workers.kernels import StepMessage, pack_step


def encode(plan: StepPlan, block_size: int) -> StepMessage:
    """Flattens a plan. Logit rows of a slice: those of its prompt targets, then those to sample from."""
    lens: list[int] = []
    starts: list[int] = []
    counts: list[int] = []
    token_ids: list[int] = []
    blocks: list[int] = []
    rows: list[int] = []
    for piece in plan.slices:
        first_row, length = len(token_ids), len(piece.token_ids)
        needed = -(-(piece.start + length) // block_size)
        table = piece.block_table
        assert length > 0 and len(table) >= needed, f"{len(table)} blocks for {piece.start} + {length} tokens"
        lens.append(length)
        starts.append(piece.start)
        counts.append(needed)
        token_ids += piece.token_ids
        blocks += table if len(table) == needed else table[:needed]
        if piece.prompt_targets is not None:
            rows += range(first_row, first_row + len(piece.prompt_targets))
        if piece.sample is not None:
            rows += range(first_row + length - 1 - piece.num_drafts, first_row + length)
    return pack_step(
        lens=lens,
        starts=starts,
        block_counts=counts,
        token_ids=token_ids,
        blocks=blocks,
        logit_rows=rows,
        zero_blocks=plan.zero_blocks,
        copy_blocks=plan.copy_blocks,
    )
