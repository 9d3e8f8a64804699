"""From logits to chosen tokens on rank 0: adjust, choose, score."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from workers.engine.step import Sampled, SampleTask
from workers.kernels import Draw, Kernels
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
    finite = kernels.finite_rows(logits)
    ids = [0] * len(tasks)
    as_they_are = [row for row, task in enumerate(tasks) if finite[row] and not is_adjusted(task)]
    to_adjust = [row for row, task in enumerate(tasks) if finite[row] and is_adjusted(task)]
    if as_they_are:
        drawn = kernels.draw(_rows(logits, as_they_are), [_draw(tasks[row]) for row in as_they_are])
        for row, token_id in zip(as_they_are, drawn, strict=True):
            ids[row] = token_id
    for row in to_adjust:
        changed = logits[row : row + 1].clone()
        adjust(changed[0], tasks[row])
        ids[row] = kernels.draw(changed, [_draw(tasks[row])])[0]
    logprobs = _logprobs(logits, tasks, ids)
    return [
        Sampled(token_id=ids[row], logprob=logprobs.get(row)) if finite[row] else None
        for row in range(len(tasks))
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
    """By row, for the tasks that ask for it."""
    by_count: dict[int, list[int]] = {}
    for row, task in enumerate(tasks):
        if task.params.num_logprobs is not None:
            by_count.setdefault(task.params.num_logprobs, []).append(row)
    found: dict[int, TokenLogprob | None] = {}
    for count, rows in by_count.items():
        scores = score_tokens(_rows(logits, rows), [ids[row] for row in rows], count)
        found.update(zip(rows, scores, strict=True))
    return found


def _rows(values: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """Those rows; the tensor itself when it is all of them."""
    return values if len(rows) == values.shape[0] else values[torch.tensor(rows, device=values.device)]
