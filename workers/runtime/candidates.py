"""The best tokens to go on with, for each hypothesis of beam searches."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from workers.decoding.beam_search import Candidate
from workers.engine.step import SampleTask
from workers.kernels import NOT_FINITE
from workers.runtime.adjust import adjust, is_adjusted
from workers.runtime.logprobs import FLOOR, best_tokens, best_values
from workers.types import TokenLogprob


def find_candidates(
    logits: torch.Tensor, drawn: Sequence[int], tasks: Sequence[SampleTask]
) -> list[tuple[Candidate, ...] | None]:
    """Of each row of logits (R, V) float32 the `num_candidates` best of its task; None: row not finite.

    drawn: of each row NOT_FINITE, or any id. Penalties, bias and forbidden ids change the log-probabilities,
    which are not made to add up to 1 again, as in transformers' beam search. Reads logits only. What a row
    gives depends on that row and its task alone.
    """
    logprobs = logits.log_softmax(-1)
    found: list[tuple[Candidate, ...] | None] = [None] * len(tasks)
    by_count: dict[int, list[int]] = {}
    for row, task in enumerate(tasks):
        if drawn[row] != NOT_FINITE:
            by_count.setdefault(task.num_candidates, []).append(row)
    for count, rows in by_count.items():
        scores = logprobs if len(rows) == len(tasks) else logprobs[rows]
        changed = [index for index, row in enumerate(rows) if is_adjusted(tasks[row])]
        if changed:
            scores = scores.clone()
            for index in changed:
                adjust(scores[index], tasks[rows[index]])
        for row, best in zip(rows, best_values(scores, count), strict=True):
            found[row] = _candidates(best, logprobs[row], tasks[row].params.num_logprobs)
    return found


def _candidates(
    best: list[tuple[int, float]], logprobs: torch.Tensor, num_top: int | None
) -> tuple[Candidate, ...]:
    """Without the forbidden ones, whose score is minus infinity."""
    allowed = [(token_id, score) for token_id, score in best if score != float("-inf")]
    if num_top is None:
        return tuple(Candidate(token_id, score) for token_id, score in allowed)
    ids = [token_id for token_id, _ in allowed]
    (top,) = best_tokens(logprobs[None], num_top)
    own: list[float] = logprobs[ids].clamp(min=FLOOR).tolist()
    return tuple(
        Candidate(token_id, score, TokenLogprob(token_id=token_id, logprob=logprob, top=top))
        for (token_id, score), logprob in zip(allowed, own, strict=True)
    )
