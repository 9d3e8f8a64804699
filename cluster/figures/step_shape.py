"""The shape of a step that the scheduler planned."""

from __future__ import annotations

from cluster.figures.step_cost import StepShape, causal_pairs
from workers.engine.step import StepPlan


def shape_of(plan: StepPlan) -> StepShape:
    """What the plan computes. A single token that is sampled after costs the same in a prompt and in an
    answer, so it counts as a decode row."""
    tokens = pairs = rows = context = 0
    for piece in plan.slices:
        count = len(piece.token_ids)
        if count == 1 and piece.sample is not None:
            rows += 1
            context += piece.start + 1
        else:
            tokens += count
            pairs += causal_pairs(count, piece.start)
    return StepShape(prefill_tokens=tokens, prefill_pairs=pairs, decode_rows=rows, context_tokens=context)
