"""Log-probabilities of tokens under the raw distribution of the model, before any penalty or filter."""

from __future__ import annotations

import torch

from workers.types import TokenLogprob

FLOOR = -9999.0  # stands for minus infinity, which JSON cannot say
_ROWS_AT_ONCE = 64  # bounds the memory of the normalised copy


def score_tokens(logits: torch.Tensor, token_ids: list[int], num_top: int) -> list[TokenLogprob | None]:
    """Scores token_ids[r] under row r of logits (R, V) with the `num_top` best ids; None: row not finite."""
    scores: list[TokenLogprob | None] = []
    for start in range(0, len(token_ids), _ROWS_AT_ONCE):
        part = logits[start : start + _ROWS_AT_ONCE]
        scores += _score(part, token_ids[start : start + _ROWS_AT_ONCE], num_top)
    return scores


def _score(logits: torch.Tensor, token_ids: list[int], num_top: int) -> list[TokenLogprob | None]:
    finite: list[bool] = logits.sum(-1).isfinite().tolist()  # a NaN or an infinity makes the sum one
    logprobs = logits.log_softmax(-1)
    targets = torch.tensor(token_ids, device=logits.device)[:, None]
    own: list[float] = logprobs.gather(1, targets)[:, 0].clamp(min=FLOOR).tolist()
    tops = best_tokens(logprobs, num_top)
    return [
        TokenLogprob(token_id=token_id, logprob=logprob, top=top) if is_finite else None
        for token_id, logprob, top, is_finite in zip(token_ids, own, tops, finite, strict=True)
    ]


def best_tokens(logprobs: torch.Tensor, count: int) -> list[tuple[tuple[int, float], ...]]:
    """The `count` best (id, logprob) of each row (R, V), best first, lower ids first on ties."""
    if count == 0:
        return [()] * logprobs.shape[0]
    return [
        tuple((token_id, max(value, FLOOR)) for token_id, value in row)
        for row in best_values(logprobs, count)
    ]


def best_values(values: torch.Tensor, count: int) -> list[list[tuple[int, float]]]:
    """The `count` > 0 best (id, value) of each row (R, V), best first, lower ids first on ties."""
    count = min(count, values.shape[1])
    # One more than asked for shows whether a tie crosses the border, where topk may take any of the equals.
    best, ids = values.topk(min(count + 1, values.shape[1]), dim=-1)
    rows = []
    for row, (row_values, row_ids) in enumerate(zip(best.tolist(), ids.tolist(), strict=True)):
        found = list(zip(row_ids, row_values, strict=True))
        if len(found) > count and row_values[count - 1] == row_values[count]:
            candidates = (values[row] >= best[row, count - 1]).nonzero()[:, 0]
            found = list(zip(candidates.tolist(), values[row, candidates].tolist(), strict=True))
        found.sort(key=lambda entry: (-entry[1], entry[0]))
        rows.append(found[:count])
    return rows
