"""Choosing one id per row of logits: the best one, or one at random after temperature and filters.

Rows are computed side by side and without regard to each other. Ties go to the lowest id. The order of the
filters is temperature, top-k, top-p (Holtzman et al. 2020), min-p (Nguyen et al. 2024): the kept set is cut
from the ids sorted by logit, then id. The draw inverts the cumulative distribution of the kept set in the
order of ids, not of probability: both are exact, but here a rounding difference moves no token to another
place, and rows without filters need no sort.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_BLOCK = 128  # ids that are summed before the cumulative sum


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """How a row is drawn."""

    temperature: float  # > 0
    top_k: int  # 0: off
    top_p: float  # > 0
    min_p: float  # < 1
    uniform: float  # in [0, 1)

    def has_filter(self, vocab_size: int) -> bool:
        return 0 < self.top_k < vocab_size or self.top_p < 1.0 or self.min_p > 0.0


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


def draw_ids(logits: torch.Tensor, draws: list[Draw]) -> torch.Tensor:
    """(R, V) -> (R,): an id per row. Reads logits only; each row must have a finite largest logit."""
    vocab_size = logits.shape[1]
    temperature = _column([draw.temperature for draw in draws], logits, torch.float32)
    relative = logits - logits.amax(-1, keepdim=True)
    weights = (relative / temperature).exp_()  # (R, V), 1 at the best id
    uniform = _column([draw.uniform for draw in draws], logits, torch.float64)
    filtered = [row for row, draw in enumerate(draws) if draw.has_filter(vocab_size)]
    if not filtered:
        return _invert(weights, uniform)
    if len(filtered) == len(draws):
        return _draw_filtered(relative, weights, uniform, draws)
    ids = _invert(weights, uniform)
    chosen = torch.tensor(filtered, device=logits.device)
    some = [draws[row] for row in filtered]
    ids[chosen] = _draw_filtered(relative[chosen], weights[chosen], uniform[chosen], some)
    return ids


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


def _draw_filtered(
    relative: torch.Tensor, weights: torch.Tensor, uniform: torch.Tensor, draws: list[Draw]
) -> torch.Tensor:
    """relative, weights (R, V); uniform (R, 1) -> (R,)."""
    vocab_size = weights.shape[1]
    total = _block_sums(weights).cumsum(-1)[:, -1:]  # (R, 1)
    top_k = _column([draw.top_k or vocab_size for draw in draws], weights, torch.int64)
    top_p = _column([draw.top_p for draw in draws], weights, torch.float64)
    min_p = _column([draw.min_p for draw in draws], weights, torch.float64)
    is_candidate = weights >= _least_weight(draws, vocab_size, total)
    limit = max((draw.top_k for draw in draws if draw.top_k < vocab_size), default=0)
    if limit:
        best = relative.topk(limit, dim=-1).values  # (R, limit), descending
        least = best.gather(1, (top_k - 1).clamp(max=limit - 1))
        is_candidate &= (relative >= least) | (top_k >= vocab_size)
    ids, scores, mass = _compact(is_candidate, relative, weights)
    order = scores.argsort(stable=True, dim=-1, descending=True)
    sorted_mass = mass.gather(1, order)
    kept = torch.arange(mass.shape[1], device=mass.device) < top_k
    ends = (sorted_mass * kept).cumsum(-1)
    whole = torch.where(top_k < vocab_size, ends[:, -1:], total)
    kept &= (ends - sorted_mass < top_p * whole) | (top_p >= 1.0)
    kept &= sorted_mass >= min_p
    kept[:, 0] = True  # the best id is never filtered
    left = mass * torch.zeros_like(kept).scatter_(1, order, kept)
    left_ends = left.cumsum(-1)
    at = (left_ends <= uniform * left_ends[:, -1:]).sum(-1, keepdim=True)
    return ids.gather(1, at)[:, 0]


def _least_weight(draws: list[Draw], vocab_size: int, total: torch.Tensor) -> torch.Tensor:
    """(R, 1) float32: a weight below which no id can be kept, so that few are left to sort.

    All ids lighter than (1 - top_p) total / V have less than 1 - top_p of the mass together: the others
    reach top_p without them. With top-k the whole mass is another one, and top-k itself leaves few.
    """
    share = [0.0 if 0 < draw.top_k < vocab_size else (1.0 - draw.top_p) / vocab_size for draw in draws]
    by_mass = _column(share, total, torch.float64) * total
    by_best = _column([draw.min_p for draw in draws], total, torch.float64)
    return (torch.maximum(by_mass, by_best) * 0.999).float()  # a margin for rounding: it only saves work


def _compact(
    is_candidate: torch.Tensor, relative: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Candidates of each row moved to the left, in the order of ids: ids, scores, mass, each (R, C).

    Places without a candidate have id 0, score -inf and mass 0.
    """
    rows, columns = is_candidate.nonzero(as_tuple=True)
    counts = torch.bincount(rows, minlength=is_candidate.shape[0])
    place = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
    shape = (is_candidate.shape[0], int(counts.max()))
    ids = rows.new_zeros(shape)
    scores = relative.new_full(shape, float("-inf"))
    mass = relative.new_zeros(shape, dtype=torch.float64)
    ids[rows, place] = columns
    scores[rows, place] = relative[rows, columns]
    mass[rows, place] = weights[rows, columns].double()
    return ids, scores, mass


def _column(values: list[float] | list[int], like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=like.device)[:, None]
