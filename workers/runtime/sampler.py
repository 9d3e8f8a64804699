"""From logits to chosen tokens on rank 0: adjust, choose, score."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from workers.engine.step import Sampled, SampleTask
from workers.kernels import NOT_FINITE, Draw, Kernels
from workers.runtime.adjust import adjust, is_adjusted
from workers.runtime.logprobs import score_tokens
from workers.runtime.philox import uniform
from workers.types import SamplingParams, TokenLogprob

GREEDY_BELOW = 1e-5  # temperature
_BEST = Draw(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, uniform=0.0)


def sample(logits: torch.Tensor, tasks: Sequence[SampleTask], kernels: Kernels) -> list[Sampled | None]:
    """Chooses a token for every row of logits (R, V) float32; None for a row that is not finite.

    Reads logits only. The token of a row depends on that row and its task alone.
    """
    to_adjust = [row for row, task in enumerate(tasks) if is_adjusted(task)]
    draws = [_draw(task) for task in tasks]
    ids = kernels.draw(logits, draws, only_finite=True)  # of rows to adjust: only whether they are finite
    for row in to_adjust:
        if ids[row] != NOT_FINITE:
            changed = logits[row : row + 1].clone()
            adjust(changed[0], tasks[row])
            ids[row] = kernels.draw(changed, [draws[row]])[0]
    logprobs = _logprobs(logits, tasks, ids)
    return [
        Sampled(token_id=token_id, logprob=logprobs.get(row)) if token_id != NOT_FINITE else None
        for row, token_id in enumerate(ids)
    ]


def is_greedy(params: SamplingParams) -> bool:
    """Whether only the best token can come out."""
    return (
        params.temperature < GREEDY_BELOW or params.top_k == 1 or params.top_p <= 0.0 or params.min_p >= 1.0
    )


def _draw(task: SampleTask) -> Draw:
    params = task.params
    if is_greedy(params):
        return _BEST
    position = len(task.prompt_token_ids) + len(task.output_token_ids)
    return Draw(
        temperature=params.temperature,
        top_k=max(0, params.top_k),
        top_p=params.top_p,
        min_p=params.min_p,
        uniform=uniform(params.seed, position, task.choice),
    )


def _logprobs(
    logits: torch.Tensor, tasks: Sequence[SampleTask], ids: list[int]
) -> dict[int, TokenLogprob | None]:
    """By row, for the tasks that ask for it and have an id."""
    by_count: dict[int, list[int]] = {}
    for row, task in enumerate(tasks):
        if task.params.num_logprobs is not None and ids[row] != NOT_FINITE:
            by_count.setdefault(task.params.num_logprobs, []).append(row)
    found: dict[int, TokenLogprob | None] = {}
    for count, rows in by_count.items():
        scores = score_tokens(_rows(logits, rows), [ids[row] for row in rows], count)
        found.update(zip(rows, scores, strict=True))
    return found


def _rows(values: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """Those rows; the tensor itself when it is all of them."""
    return values if len(rows) == values.shape[0] else values[torch.tensor(rows, device=values.device)]
