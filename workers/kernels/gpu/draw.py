"""One id for every row of logits, by the rules of `workers.kernels.draw`, which is the torch form.

Three kernels. `scan_block`: the best of BLOCK ids, and whether all are finite. `weigh_block`: their mass.
`draw_row`: the id of a row. One without filters is done with the sums of its blocks and a look into one of
them. One with top-k or top-p looks for the logit where the kept set ends, by counting or adding up what is
above 15 levels at once; blocks whose best is below the search are passed over.

Masses are float32 exponentials, added by block in float32 and over blocks in float64, in the order of ids.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton

from workers.kernels.draw import Draw, pack_draws
from workers.kernels.gpu.draw_kernels import draw_row, scan_block, weigh_block
from workers.kernels.gpu.tiles import width_of

BLOCK = 2048  # ids


def draw(logits: torch.Tensor, draws: Sequence[Draw], *, only_finite: bool) -> list[int]:
    """As `Kernels.draw`. Waits for the ids."""
    if not draws:
        return []
    columns = torch.tensor(pack_draws(draws), dtype=torch.float64).view(len(draws), len(Draw._fields))
    ids: list[int] = draw_ids(logits, columns.to(logits.device), only_finite=only_finite).tolist()
    return ids


def start_draw(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """As `Kernels.draw_ids`."""
    columns = torch.tensor(pack_draws(draws), dtype=torch.float64).view(len(draws), len(Draw._fields))
    # A copy from pinned memory need not be waited for; torch keeps it until then.
    on_device = columns.pin_memory().to(logits.device, non_blocking=True) if logits.is_cuda else columns
    return draw_ids(logits, on_device, only_finite=True)


def draw_ids(logits: torch.Tensor, draws: torch.Tensor, *, only_finite: bool) -> torch.Tensor:
    """(R,) int64, without waiting: logits (R, V) float32 with dense rows, draws (R, 5) float64 as `Draw`."""
    rows, vocab_size = logits.shape
    assert draws.shape == (rows, len(Draw._fields)) and draws.dtype == torch.float64, (draws.shape, rows)
    assert logits.dtype == torch.float32 and vocab_size > 0 and draws.is_contiguous(), logits.dtype
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    blocks = triton.cdiv(vocab_size, BLOCK)
    best = torch.empty((rows, blocks), dtype=torch.float32, device=logits.device)
    mass = torch.empty_like(best)
    place = torch.empty((rows, blocks), dtype=torch.int32, device=logits.device)
    is_bad = torch.empty_like(place)
    ids = torch.empty((rows,), dtype=torch.int64, device=logits.device)
    if rows == 0:
        return ids
    row = (logits.stride(0), vocab_size, blocks)
    scan_block[(rows, blocks)](logits, best, place, is_bad, *row, BLOCK=BLOCK, num_warps=8)
    weigh_block[(rows, blocks)](
        logits, draws, best, mass, *row, BLOCK=BLOCK, WIDTH=width_of(blocks), num_warps=8
    )
    draw_row[(rows,)](
        *(logits, draws, best, place, is_bad, mass, ids, *row, only_finite),
        BLOCK=BLOCK,
        WIDTH=width_of(blocks),
        num_warps=8,
    )
    return ids
