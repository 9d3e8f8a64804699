"""Rotary embedding of queries and keys, and the write of keys and values into their pages.

The torch form is `TorchKernels.rotary_and_write`. Queries turn in place. Keys are read from their row and
written to the pool alone, rounded to the dtype of the model first, then to codes where it holds codes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from workers.kernels.gpu.kv_codes import to_codes
from workers.kernels.gpu.tiles import warps_of, width_of

_HEADS = 4  # that share a program


def rotary_and_write(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    turn: tuple[torch.Tensor, torch.Tensor] | None,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """As `Kernels.rotary_and_write`: turn is cosines and sines (T, rot / 2); scales are those of a pool of
    codes, of keys and of values, (num_blocks, kv_heads, block_size)."""
    q, k, v = dense_heads(q), dense_heads(k), dense_heads(v)
    tokens, heads, dim = q.shape
    if tokens == 0:
        return q
    cos, sin = (None, None) if turn is None else (turn[0].contiguous(), turn[1].contiguous())
    half = 0 if cos is None else cos.shape[1]
    key_scales, value_scales = (None, None) if scales is None else scales
    scale_strides = (0, 0) if key_scales is None else (key_scales.stride(0), key_scales.stride(1))
    turning = 0 if cos is None else triton.cdiv(heads, _HEADS)
    _rotary_and_write[(tokens, turning + triton.cdiv(k.shape[1], _HEADS))](
        *(q, k, v, cos, sin, slots, keys, values, key_scales, value_scales),
        *(q.stride(0), k.stride(0), v.stride(0), q.stride(1), k.stride(1), v.stride(1)),
        *(keys.stride(0), keys.stride(1), *scale_strides),
        *(heads, k.shape[1], turning, half),
        DIM=dim,
        BLOCK_SIZE=keys.shape[2],
        HEADS=_HEADS,
        WIDTH=width_of(dim),
        HALF_WIDTH=width_of(max(1, half)),
        num_warps=warps_of(_HEADS * width_of(dim)),
    )
    return q


def dense_heads(x: torch.Tensor) -> torch.Tensor:
    """x (T, heads, d) with a dense last axis."""
    return x if x.stride(2) == 1 else x.contiguous()


@triton.jit
def _rotary_and_write(
    q,
    k,
    v,
    cos,
    sin,
    slots,
    keys,
    values,
    key_scales,
    value_scales,
    q_token,
    k_token,
    v_token,
    q_head,
    k_head,
    v_head,
    cache_block,
    cache_head,
    scale_block,
    scale_head,
    heads,
    kv_heads,
    turning,
    half,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF_WIDTH: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    if cos is not None:
        angles = token * half
        if group < turning:
            head = group * HEADS + tl.arange(0, HEADS)
            _turn_in_place(
                q + token * q_token, cos + angles, sin + angles, head, heads, q_head, half, HALF_WIDTH
            )
    slot = tl.load(slots + token)
    if (group >= turning) & (slot >= 0):
        head = (group - turning) * HEADS + tl.arange(0, HEADS)
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        page = block * cache_block + offset * DIM
        scale_page = block * scale_block + offset
        column = tl.arange(0, WIDTH)
        is_real = (head < kv_heads)[:, None] & (column < DIM)[None, :]
        place = k + token * k_token + head[:, None] * k_head
        row = tl.load(place + column[None, :], mask=is_real, other=0.0)
        if cos is not None:
            row = _turned(row, place, cos + token * half, sin + token * half, is_real, half, WIDTH)
        _write(row, keys + page, key_scales, scale_page, head, is_real, cache_head, scale_head, WIDTH)
        place = v + token * v_token + head[:, None] * v_head
        row = tl.load(place + column[None, :], mask=is_real, other=0.0)
        _write(row, values + page, value_scales, scale_page, head, is_real, cache_head, scale_head, WIDTH)


@triton.jit
def _turn_in_place(x, cos, sin, head, heads, head_stride, half, HALF_WIDTH: tl.constexpr):
    """Turns the pairs (i, i + half) of heads (h,); x, cos and sin point to the row of one token."""
    pair = tl.arange(0, HALF_WIDTH)
    is_pair = pair < half
    is_real = (head < heads)[:, None] & is_pair[None, :]
    # Both elements of a pair are read and written by one thread: no other one reads what it overwrites.
    place = x + head[:, None] * head_stride + pair[None, :]
    first = tl.load(place, mask=is_real, other=0.0).to(tl.float32)
    second = tl.load(place + half, mask=is_real, other=0.0).to(tl.float32)
    c = tl.load(cos + pair, mask=is_pair, other=0.0)[None, :]
    s = tl.load(sin + pair, mask=is_pair, other=0.0)[None, :]
    tl.store(place, (first * c - second * s).to(x.dtype.element_ty), mask=is_real)
    tl.store(place + half, (second * c + first * s).to(x.dtype.element_ty), mask=is_real)


@triton.jit
def _turned(row, place, cos, sin, is_real, half, WIDTH: tl.constexpr):
    """row (h, WIDTH), loaded from the starts of rows `place` (h, 1), turned and rounded to its dtype."""
    column = tl.arange(0, WIDTH)
    is_first, turns = column < half, column < 2 * half
    pair = tl.where(is_first, column, column - half)
    partner = tl.where(is_first, column + half, column - half)
    other = tl.load(place + partner[None, :], mask=is_real & turns[None, :], other=0.0).to(tl.float32)
    c = tl.load(cos + pair, mask=turns, other=1.0)
    s = tl.load(sin + pair, mask=turns, other=0.0)
    s = tl.where(is_first, -s, s)
    turned = (row.to(tl.float32) * c[None, :] + other * s[None, :]).to(row.dtype)
    return tl.where(turns[None, :], turned, row)


@triton.jit
def _write(row, page, scales, scale_page, head, is_real, page_stride, scale_stride, WIDTH: tl.constexpr):
    """Stores rows (h, WIDTH) of heads (h,) at `page`, as codes and a scale each where there are scales."""
    place = page + head.to(tl.int64)[:, None] * page_stride + tl.arange(0, WIDTH)[None, :]
    if scales is None:
        tl.store(place, row.to(page.dtype.element_ty), mask=is_real)
    else:
        codes, scale = to_codes(row.to(tl.float32))
        tl.store(place, codes, mask=is_real)
        is_head = tl.max(is_real.to(tl.int32), axis=1) > 0
        tl.store(scales + scale_page + head.to(tl.int64) * scale_stride, scale, mask=is_head)
