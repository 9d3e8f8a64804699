"""From logits to chosen tokens on rank 0: how to draw, and what is left to do when ids have been drawn."""

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
_ADJUSTED_ROWS = 16  # copied at a time: of a vocabulary of 128 k tokens 8 MiB
BEST = Draw(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, uniform=0.0)


def sample(
    logits: torch.Tensor, drawn: Sequence[int], tasks: Sequence[SampleTask], kernels: Kernels
) -> list[Sampled | None]:
    """The token of every row of logits (R, V) float32; None for a row that is not finite.

    drawn: ids of the rows as `draw_of` says, before any penalty; NOT_FINITE where there is none. Reads logits
    only. The token of a row depends on that row and its task alone.
    """
    ids = list(drawn)
    rows = [row for row, task in enumerate(tasks) if is_adjusted(task) and ids[row] != NOT_FINITE]
    for first in range(0, len(rows), _ADJUSTED_ROWS):
        part = rows[first : first + _ADJUSTED_ROWS]
        changed = logits[torch.tensor(part, device=logits.device)]  # a copy
        for place, row in enumerate(part):
            adjust(changed[place], tasks[row])
        found = kernels.draw(changed, [draw_of(tasks[row]) for row in part])
        for row, token_id in zip(part, found, strict=True):
            ids[row] = token_id
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


def draw_of(task: SampleTask, num_drafts: int = 0) -> Draw:
    """How its token is drawn, when so many drafts more come before it."""
    params = task.params
    if is_greedy(params):
        return BEST
    position = len(task.prompt_token_ids) + task.num_new + num_drafts
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
