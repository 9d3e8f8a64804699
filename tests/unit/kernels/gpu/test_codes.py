"""Pools of int8 codes, and what else changes the scores: the soft cap."""

from __future__ import annotations

import math

import pytest
import torch

from tests.unit.kernels.gpu.support import DTYPES, assert_close, batch_on_device, noise
from workers.kernels.gpu.attention import paged_attention
from workers.kernels.gpu.interpreter import DEVICE
from workers.kernels.gpu.rotary import rotary_and_write

MIX = [(5, 1), (0, 9), (290, 3)]
SHAPES = [(3, 1, 64, 16), (4, 4, 80, 8), (6, 2, 128, 32)]  # heads, KV heads, head size, block size


def codes_of(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rule, row by row."""
    codes, scales = torch.zeros(x.shape, dtype=torch.int8), torch.zeros(x.shape[:-1], dtype=torch.float16)
    flat_codes, flat_scales = codes.view(-1, x.shape[-1]), scales.view(-1)
    for at, row in enumerate(x.float().cpu().view(-1, x.shape[-1])):
        step = row.abs().max() / 127
        if not row.isfinite().all() or step > 65504:
            flat_scales[at] = math.nan
            continue
        scale = step.half()
        if scale.float() < step:
            scale = torch.nextafter(scale, torch.tensor(math.inf, dtype=torch.float16))
        flat_scales[at] = scale
        if scale > 0:
            flat_codes[at] = (row / scale.float()).round().to(torch.int8)
    return codes.to(DEVICE), scales.to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "block_size"), SHAPES)
def test_rows_are_written_as_codes(
    dtype: torch.dtype, heads: int, kv_heads: int, dim: int, block_size: int
) -> None:
    batch = batch_on_device(MIX, block_size, 60)
    q, k, v = (noise(13, n, dim, dtype=dtype, seed=n) for n in (heads, kv_heads, kv_heads))
    k[0] *= 1e-8  # a scale that is subnormal
    k[1] = 0
    k[2, 0, 3] = math.nan
    v[2, 0, 3] = -math.inf
    v[3] *= 1e30
    v[4, 0, 0] = 1e-30
    angles = noise(13, dim // 2, seed=9)
    turn = angles.cos(), angles.sin()
    plain = torch.zeros(2, 60, kv_heads, block_size, dim, dtype=dtype, device=DEVICE)
    wanted_q = rotary_and_write(q.clone(), k, v, turn, batch.slots, plain[0], plain[1], None)
    codes = torch.zeros(2, 60, kv_heads, block_size, dim, dtype=torch.int8, device=DEVICE)
    scales = torch.zeros(2, 60, kv_heads, block_size, dtype=torch.float16, device=DEVICE)
    found_q = rotary_and_write(q, k, v, turn, batch.slots, codes[0], codes[1], (scales[0], scales[1]))
    assert torch.equal(found_q, wanted_q)
    wanted_codes, wanted_scales = codes_of(plain)
    assert torch.equal(codes, wanted_codes)
    assert torch.equal(scales.isnan(), wanted_scales.isnan()) and bool(scales.isnan().any())
    assert torch.equal(scales.nan_to_num(), wanted_scales.nan_to_num())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("soft_cap", [None, 5.0])
@pytest.mark.parametrize("is_coded", [True, False])
def test_attention(dtype: torch.dtype, window: int | None, soft_cap: float | None, is_coded: bool) -> None:
    batch = batch_on_device(MIX, 16, 60)
    pool = 2 * noise(2, 60, 2, 16, 64, dtype=dtype)
    q, scales = 3 * noise(13, 6, 64, dtype=dtype, seed=1), None
    keys, values = pool[0], pool[1]
    if is_coded:
        codes, steps = codes_of(pool)
        (keys, values), scales = codes, (steps[0], steps[1])
        pool = (codes.float() * steps.float()[..., None]).to(torch.float32)
    found = paged_attention(
        *(q, keys, values, scales, batch), scale=0.125, sliding_window=window, soft_cap=soft_cap
    )
    wanted = attention(q.float(), pool.float(), batch, 0.125, window, soft_cap).to(dtype)
    assert_close(found, wanted)


def attention(q, pool, batch, scale, window, soft_cap):
    """Row by row."""
    out = torch.zeros_like(q)
    for sequence in range(len(batch.context_lens)):
        for row in range(*batch.query_starts[sequence : sequence + 2].tolist()):
            last = int(batch.positions[row])
            at = torch.arange(0 if window is None else max(0, last - window + 1), last + 1, device=DEVICE)
            block = batch.block_tables[sequence, at // 16].long()
            keys, values = pool[:, block, :, at % 16].unbind(1)  # (seen, kv_heads, d)
            for head in range(q.shape[1]):
                kv_head = head // (q.shape[1] // keys.shape[1])
                scores = keys[:, kv_head] @ q[row, head] * scale
                if soft_cap is not None:
                    scores = soft_cap * torch.tanh(scores / soft_cap)
                out[row, head] = scores.softmax(0) @ values[:, kv_head]
    return out


def test_stale_scales_do_not_count() -> None:
    batch = batch_on_device([(20, 1)], 16, 4)
    codes, steps = codes_of(noise(2, 4, 1, 16, 32))
    q = noise(1, 2, 32)
    scales = steps[0], steps[1]
    wanted = paged_attention(
        q, codes[0], codes[1], scales, batch, scale=0.2, sliding_window=None, soft_cap=None
    )
    block = int(batch.block_tables[0, 1])
    codes[:, block, :, 5:], steps[:, block, :, 5:] = 127, math.nan
    found = paged_attention(
        q, codes[0], codes[1], scales, batch, scale=0.2, sliding_window=None, soft_cap=None
    )
    assert torch.equal(found, wanted) and bool(wanted.isfinite().all())
