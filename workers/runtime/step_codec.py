"""From a plan to the message that all ranks compute."""

from __future__ import annotations

from workers.engine.step import SequenceSlice, StepPlan, StepResult
from workers.kernels import StepMessage, pack_step


def encode(plan: StepPlan, block_size: int) -> StepMessage:
    """Flattens a plan. Logit rows of a slice: those of its prompt targets, then those to sample from."""
    lens: list[int] = []
    starts: list[int] = []
    counts: list[int] = []
    token_ids: list[int] = []
    blocks: list[int] = []
    rows: list[int] = []
    parents: list[int] = []
    lengths: list[int] = []
    has_lengths = has_trees = False
    for piece in plan.slices:
        first_row, length, start, table = len(token_ids), len(piece.token_ids), piece.start, piece.block_table
        needed = -(-(start + length) // block_size)
        assert length > 0 and len(table) >= needed, f"{len(table)} blocks for {start} + {length} tokens"
        lens.append(length)
        starts.append(start)
        counts.append(needed)
        token_ids += piece.token_ids
        blocks += table if len(table) == needed else table[:needed]
        has_trees |= piece.draft_parents is not None
        has_lengths |= piece.num_known > 0
        if piece.prompt_targets is not None:
            rows += range(first_row, first_row + len(piece.prompt_targets))
        if piece.sample is not None:
            if piece.num_drafts:
                rows += range(first_row + length - 1 - piece.num_drafts, first_row + length)
            else:
                rows.append(first_row + length - 1)
    if has_trees:
        for piece in plan.slices:
            parents += _parents(piece)
    if has_lengths:
        lengths += (piece.num_known or piece.start + len(piece.token_ids) for piece in plan.slices)
    return pack_step(
        lens=lens,
        starts=starts,
        block_counts=counts,
        token_ids=token_ids,
        blocks=blocks,
        logit_rows=rows,
        zero_blocks=plan.zero_blocks,
        copy_blocks=plan.copy_blocks,
        parents=parents,
        lengths=lengths,
    )


def encode_moves(plan: StepPlan, results: StepResult, block_size: int) -> StepMessage | None:
    """What is left to do after a step with trees: keys and values of the drafts that came true have to lie
    one behind the other. None when they do."""
    moves: list[tuple[int, int]] = []
    for piece, result in zip(plan.slices, results.slices, strict=True):
        first = piece.start + len(piece.token_ids) - 1 - piece.num_drafts
        for place, row in enumerate(result.rows):
            if row != place:
                slots = (_slot(piece, position, block_size) for position in (first + row, first + place))
                moves.append((next(slots), next(slots)))
    if not moves:
        return None
    return pack_step(lens=(), starts=(), block_counts=(), token_ids=(), blocks=(), logit_rows=(), moves=moves)


def _slot(piece: SequenceSlice, position: int, block_size: int) -> int:
    return piece.block_table[position // block_size] * block_size + position % block_size


def _parents(piece: SequenceSlice) -> list[int]:
    """Of each token of a slice, the row that it follows."""
    length = len(piece.token_ids)
    if piece.draft_parents is None:
        return list(range(-1, length - 1))
    before = length - piece.num_drafts
    return [*range(-1, before - 1), *(before + parent for parent in piece.draft_parents)]
