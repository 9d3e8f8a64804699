"""Choosing one id per row of logits: the best one, or one at random after temperature and filters.

In torch, for any device; `cpu/draw.h` is the same in C++. Rows are computed side by side and without regard
to each other. Ties go to the lowest id. The order of the filters is temperature, top-k, top-p (Holtzman et
al. 2020), min-p (Nguyen et al. 2024): the kept set is cut from the ids sorted by logit, then id. The draw
inverts the cumulative distribution of the kept set in the order of ids, not of probability: both are exact,
but here a rounding difference moves no token to another place, and rows without filters need no sort.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

NOT_FINITE = -1  # instead of an id
_BLOCK = 128  # ids that are summed before the cumulative sum


class Draw(NamedTuple):
    """How a row is drawn; in the order of Draw in cpu/draw.h."""

    temperature: float  # > 0, or 0: the best id
    top_k: int  # 0: off
    top_p: float  # > 0
    min_p: float  # < 1
    uniform: float  # in [0, 1)


def pack_draws(draws: Sequence[Draw]) -> array[float]:
    """As the C entry points take them."""
    return array("d", chain.from_iterable(draws))


_Method = Callable[[torch.Tensor, Sequence[Draw]], torch.Tensor]


def best_ids(logits: torch.Tensor) -> torch.Tensor:
    """(R, V) -> (R,): the id of the largest logit, the lowest one on ties.

    In two levels, because a plain maximum is many times faster than a maximum with its place.
    """
    whole = logits.shape[1] // _BLOCK * _BLOCK
    if whole == 0 or logits.is_cuda:
        return logits.argmax(-1)
    blocks = logits[:, :whole].view(len(logits), -1, _BLOCK)
    block = blocks.amax(-1).argmax(-1)  # (R,)
    inside = blocks[torch.arange(len(block)), block]  # (R, _BLOCK)
    best = block * _BLOCK + inside.argmax(-1)
    if whole < logits.shape[1]:
        last, at = logits[:, whole:].max(-1)
        best = torch.where(last > inside.amax(-1), whole + at, best)
    return best


def draw_ids(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """(R, V) -> (R,): an id per row. Reads logits only; each row must have a finite largest logit."""
    ids = torch.zeros(len(draws), dtype=torch.int64, device=logits.device)
    vocab_size = logits.shape[1]
    by_method: dict[_Method, list[int]] = {}
    for row, draw in enumerate(draws):
        by_method.setdefault(_method(draw, vocab_size), []).append(row)
    for method, rows in by_method.items():
        if len(rows) == len(draws):
            return method(logits, draws)
        chosen = torch.tensor(rows, device=logits.device)
        ids[chosen] = method(logits[chosen], [draws[row] for row in rows])
    return ids


def _method(draw: Draw, vocab_size: int) -> _Method:
    if draw.temperature == 0.0:
        return _best
    if 0 < draw.top_k < vocab_size:
        return _draw_of_best
    return _draw_of_heaviest if draw.top_p < 1.0 or draw.min_p > 0.0 else _draw_of_all


def _best(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    return best_ids(logits)


def _draw_of_all(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    return _invert(_weights(logits, draws), _uniforms(draws, logits))


def _draw_of_best(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Rows with top-k: only the k best ids are looked at."""
    limit = max(draw.top_k for draw in draws)
    top_k = _column([draw.top_k for draw in draws], logits, torch.int64)
    scores, ids = logits.topk(min(limit + 1, logits.shape[1]), dim=-1)
    least = scores.gather(1, top_k - 1)
    if scores.shape[1] > limit and bool((least == scores[:, -1:]).any()):
        # Ids that tie with the last one kept go on beyond what topk returned, and it may take any of them.
        ids, scores = _compact(logits >= least, logits)
    else:
        ids, order = ids.sort(dim=-1)
        scores = scores.gather(1, order)
    return _draw_of_candidates(ids, scores, None, draws)


def _draw_of_heaviest(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Rows with top-p or min-p but no top-k: only ids that are heavy enough to be kept are sorted.

    All ids lighter than (1 - top_p) total / V have less than 1 - top_p of the mass together: the others
    reach top_p without them.
    """
    weights = _weights(logits, draws)
    total = _block_sums(weights).cumsum(-1)[:, -1:]  # (R, 1)
    light = _column([(1.0 - draw.top_p) / logits.shape[1] for draw in draws], logits, torch.float64) * total
    least = torch.maximum(light, _column([draw.min_p for draw in draws], logits, torch.float64))
    ids, scores = _compact(weights >= (0.999 * least).float(), logits)  # a margin for rounding
    return _draw_of_candidates(ids, scores, total, draws)


def _draw_of_candidates(
    ids: torch.Tensor, scores: torch.Tensor, total: torch.Tensor | None, draws: Sequence[Draw]
) -> torch.Tensor:
    """Filters and draws. ids, scores (R, C) in the order of ids, empty places at the end with score -inf.

    total (R, 1): mass of the whole row, 1 for the best id; None: of the k best candidates.
    """
    top_k = _column([draw.top_k or ids.shape[1] for draw in draws], scores, torch.int64)
    top_p = _column([draw.top_p for draw in draws], scores, torch.float64)
    min_p = _column([draw.min_p for draw in draws], scores, torch.float64)
    temperature = _column([draw.temperature for draw in draws], scores, torch.float64)
    mass = ((scores - scores.amax(-1, keepdim=True)).double() / temperature).exp()
    order = scores.argsort(stable=True, dim=-1, descending=True)
    sorted_mass = mass.gather(1, order)
    kept = torch.arange(ids.shape[1], device=ids.device) < top_k
    ends = (sorted_mass * kept).cumsum(-1)
    kept &= (ends - sorted_mass < top_p * (ends[:, -1:] if total is None else total)) | (top_p >= 1.0)
    kept &= sorted_mass >= min_p
    kept[:, 0] = True  # the best id is never filtered
    left = mass * torch.zeros_like(kept).scatter_(1, order, kept)
    ends = left.cumsum(-1)
    at = (ends <= _uniforms(draws, scores) * ends[:, -1:]).sum(-1, keepdim=True)
    return ids.gather(1, at)[:, 0]


def _weights(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """(R, V): probabilities after temperature, relative to the best id's."""
    temperature = _column([draw.temperature for draw in draws], logits, torch.float32)
    return (logits - logits.amax(-1, keepdim=True)).div_(temperature).exp_()


def _invert(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Inverse of the cumulative distribution of rows (R, V) at uniform (R, 1): by block, then inside."""
    sums = _block_sums(weights)
    ends = sums.cumsum(-1)  # (R, blocks) float64
    block = (ends <= uniform * ends[:, -1:]).sum(-1, keepdim=True)
    start = ends.gather(1, block) - sums.gather(1, block)
    share = ((uniform * ends[:, -1:] - start) / sums.gather(1, block)).clamp(0.0, 1.0 - 1e-15)
    ids = block * _BLOCK + torch.arange(_BLOCK, device=weights.device)  # (R, _BLOCK)
    is_id = ids < weights.shape[1]
    inside = weights.gather(1, ids.clamp(max=weights.shape[1] - 1)).double() * is_id
    inside_ends = inside.cumsum(-1)
    at = (inside_ends <= share * inside_ends[:, -1:]).sum(-1, keepdim=True)
    return (block * _BLOCK + at)[:, 0]


def _block_sums(weights: torch.Tensor) -> torch.Tensor:
    """(R, V) -> (R, blocks) float64. Never one sum over a whole row: torch may split that by threads."""
    whole = weights.shape[1] // _BLOCK * _BLOCK
    parts = [weights[:, :whole].view(len(weights), -1, _BLOCK).sum(-1)] if whole else []
    if whole < weights.shape[1]:
        parts.append(weights[:, whole:].sum(-1, keepdim=True))
    return torch.cat(parts, dim=1).double()


def _compact(is_candidate: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(R, V) -> ids and scores (R, C): candidates moved to the left, in the order of ids."""
    flat = is_candidate.view(-1)
    if flat.device.type == "cpu":  # numpy is several times faster at this
        places = torch.from_numpy(np.flatnonzero(flat.numpy()))
    else:
        places = flat.nonzero()[:, 0]
    rows = places // logits.shape[1]
    counts = torch.bincount(rows, minlength=logits.shape[0])
    columns = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
    shape = (logits.shape[0], int(counts.max()))
    ids = rows.new_zeros(shape)
    scores = logits.new_full(shape, float("-inf"))
    ids[rows, columns] = places % logits.shape[1]
    scores[rows, columns] = logits.reshape(-1)[places]
    return ids, scores


def _uniforms(draws: Sequence[Draw], like: torch.Tensor) -> torch.Tensor:
    return _column([draw.uniform for draw in draws], like, torch.float64)


def _column(values: list[float] | list[int], like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=like.device)[:, None]
