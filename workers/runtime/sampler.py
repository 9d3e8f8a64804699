"""From logits to chosen tokens on rank 0: adjust, choose, score."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from workers.engine.step import Sampled, SampleTask
from workers.runtime.adjust import adjust, is_adjusted
from workers.runtime.draw import Draw, best_ids, draw_ids
from workers.runtime.logprobs import finite_rows, score_tokens
from workers.runtime.philox import uniform
from workers.types import SamplingParams, TokenLogprob

GREEDY_BELOW = 1e-5  # temperature
_ELEMENTS_AT_ONCE = 1 << 18  # logits copied and worked on in one go: 1 MiB stays in the cache of a core


def sample(logits: torch.Tensor, tasks: Sequence[SampleTask]) -> list[Sampled | None]:
    """Chooses a token for every row of logits (R, V) float32; None for a row that is not finite.

    Reads logits only. The token of a row depends on that row and its task alone.
    """
    finite = finite_rows(logits)
    ids = [0] * len(tasks)
    plain = [row for row, task in enumerate(tasks) if is_greedy(task.params) and not is_adjusted(task)]
    set_apart = set(plain)
    other = [row for row in range(len(tasks)) if finite[row] and row not in set_apart]
    if plain:
        _put(ids, plain, best_ids(_rows(logits, plain)))
    at_once = max(1, _ELEMENTS_AT_ONCE // logits.shape[1])
    for start in range(0, len(other), at_once):
        _choose_adjusted(logits, tasks, other[start : start + at_once], ids)
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


def _choose_adjusted(
    logits: torch.Tensor, tasks: Sequence[SampleTask], rows: list[int], ids: list[int]
) -> None:
    """Fills in the ids of some rows that have adjustments or chance."""
    changed = logits[torch.tensor(rows, device=logits.device)]  # a copy
    for place, row in enumerate(rows):
        if is_adjusted(tasks[row]):
            adjust(changed[place], tasks[row])
    greedy = [place for place, row in enumerate(rows) if is_greedy(tasks[row].params)]
    random = [place for place, row in enumerate(rows) if not is_greedy(tasks[row].params)]
    if greedy:
        _put(ids, [rows[place] for place in greedy], best_ids(_rows(changed, greedy)))
    if random:
        drawn = draw_ids(_rows(changed, random), [_draw(tasks[rows[place]]) for place in random])
        _put(ids, [rows[place] for place in random], drawn)


def _draw(task: SampleTask) -> Draw:
    params = task.params
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


def _put(ids: list[int], rows: list[int], chosen: torch.Tensor) -> None:
    for row, token_id in zip(rows, chosen.tolist(), strict=True):
        ids[row] = token_id
