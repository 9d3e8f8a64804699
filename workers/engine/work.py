"""How much arithmetic and how many bytes a step of a model takes, from its shape alone.

    floating-point operations   2 per weight of the linear layers and token
                                2 per weight of the head and row of logits
                                4 per layer, query head, element of a head, and pair of query and key
    bytes read                  all weights once a step, of experts those that its tokens are likely to
                                choose, and the keys and values of every context

Not covered: norms, activations, the embedding's rows, what is written, and what other ranks are told.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from workers.engine.step import StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWork:
    """What counts of a model, over all ranks of its group."""

    linear_weights: int  # in matrix products of every token, which goes through some of the experts
    head_weights: int  # in those of a row of logits
    attention_width: int  # layers * query heads * elements of a head
    weight_bytes: int  # of both, with all experts, as they lie in memory
    kv_bytes_per_token: int
    expert_bytes: int = 0  # of weight_bytes, what belongs to experts
    expert_share: float = 1.0  # of the experts, those that a token goes through


class StepWork(NamedTuple):
    """Of one step."""

    flop: float
    read_bytes: float


def step_work(model: ModelWork, plan: StepPlan) -> StepWork:
    """Counts a plan. A chunk of a prompt reads its context once for all its rows."""
    tokens = pairs = contexts = rows = 0
    for piece in plan.slices:
        new = len(piece.token_ids)
        tokens += new
        pairs += new * piece.start + new * (new + 1) // 2  # each sees itself and all before it
        contexts += piece.start + new
        rows += len(piece.prompt_targets or ()) + (0 if piece.sample is None else 1 + piece.num_drafts)
    flop = 2.0 * (model.linear_weights * tokens + model.head_weights * rows)
    flop += 4.0 * model.attention_width * pairs
    # What no token goes through, when each one's choice is as good as random.
    idle_bytes = model.expert_bytes * (1.0 - model.expert_share) ** tokens
    return StepWork(flop, model.weight_bytes - idle_bytes + model.kv_bytes_per_token * contexts)
