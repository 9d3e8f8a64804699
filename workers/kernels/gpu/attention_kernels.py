"""The kernels of `workers.kernels.gpu.attention`, where the method is told."""

from __future__ import annotations

import triton
import triton.language as tl

from workers.kernels.gpu.attention_tiles import cells_of, divide, find_tokens, fold, weigh_tile


@triton.jit(do_not_specialize=["sequences", "table_stride"])
def attend(
    q,
    keys,
    values,
    key_scales,
    value_scales,
    query_starts,
    positions,
    parents,
    tables,
    q_token,
    q_head,
    cache_block,
    cache_head,
    scale_block,
    scale_head,
    table_stride,
    sequences,
    scale,
    window,
    cap,
    out,
    bests,
    masses,
    parts,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
):
    """Program (query tile, KV head): all splits, folded, into `out` (T, heads, d). With `parts`, program
    (query tile, KV head, split): one split, into bests and masses (T, heads, splits) and parts (..., d).
    With `parents` a tile is one token."""
    tile, kv_head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)  # long prompts' ends first
    sequence, first, start, end = find_tokens(query_starts, sequences, tile, TOKENS)
    if start >= end:
        return
    first_position = tl.load(positions + start).to(tl.int32)
    last_position = tl.load(positions + end - 1).to(tl.int32)
    low, high = 0, last_position + 1
    if HAS_WINDOW:
        low = tl.maximum(first_position - window + 1, 0) // TILE * TILE
    if parts is not None:
        split = tl.program_id(2)
        low, high = tl.maximum(low, split * SPLIT), tl.minimum(high, (split + 1) * SPLIT)
        if low >= high:
            return

    row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    token = start + row // GROUP
    head = kv_head * GROUP + row % GROUP
    is_row = (row < TOKENS * GROUP) & (token < end)
    is_real = is_row[:, None] & (column < DIM)[None, :]
    wide_token = token.to(tl.int64)
    place = (wide_token * q_token + head * q_head)[:, None] + column[None, :]
    queries = tl.load(q + place, mask=is_real, other=0.0)
    position = tl.load(positions + token, mask=is_row, other=-1).to(tl.int32)
    table = tables + sequence.to(tl.int64) * table_stride
    keys += kv_head.to(tl.int64) * cache_head
    values += kv_head.to(tl.int64) * cache_head
    if key_scales is not None:
        key_scales += kv_head.to(tl.int64) * scale_head
        value_scales += kv_head.to(tl.int64) * scale_head

    best = tl.full([ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, WIDTH], tl.float32)
    split_best, split_mass, split_total = best, mass, total
    for tile_start in tl.range(low, high, TILE):
        if parts is None and tile_start % SPLIT == 0:
            best, mass, total = fold(best, mass, total, split_best, split_mass, split_total)
            split_best = tl.full([ROWS], float("-inf"), tl.float32)
            split_mass = tl.zeros([ROWS], tl.float32)
            split_total = tl.zeros([ROWS, WIDTH], tl.float32)
        at = tile_start + tl.arange(0, TILE)
        cells = at
        if parents is not None:
            before = tl.load(positions + first).to(tl.int32)
            cells = cells_of(
                at, tile_start, before, start - first, last_position - before, parents + first, TILE
            )
        split_best, split_mass, split_total = weigh_tile(
            queries,
            split_best,
            split_mass,
            split_total,
            at,
            cells,
            high,
            position,
            table,
            keys,
            values,
            key_scales,
            value_scales,
            cache_block,
            scale_block,
            scale,
            window,
            cap,
            DIM,
            WIDTH,
            BLOCK_SIZE,
            HAS_WINDOW,
            HAS_CAP,
        )
    result = wide_token * tl.num_programs(1) * GROUP + head
    if parts is None:
        best, mass, total = fold(best, mass, total, split_best, split_mass, split_total)
        place = result[:, None] * DIM + column[None, :]
        tl.store(out + place, divide(total, mass).to(out.dtype.element_ty), mask=is_real)
    else:
        result = result * tl.num_programs(2) + split
        tl.store(bests + result, split_best, mask=is_row)
        tl.store(masses + result, split_mass, mask=is_row)
        tl.store(parts + result[:, None] * DIM + column[None, :], split_total, mask=is_real)


@triton.jit(do_not_specialize=["splits"])
def fold_splits(
    bests,
    masses,
    parts,
    positions,
    out,
    splits,
    window,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Program (token, KV head): the splits that the token's heads saw, in order, into `out`."""
    token, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions + token).to(tl.int32)
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(position - window + 1, 0) // SPLIT
    end = tl.minimum(position // SPLIT + 1, splits)  # a row of padding may be anywhere
    row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    is_row = row < GROUP
    is_real = is_row[:, None] & (column < DIM)[None, :]
    result = token * tl.num_programs(1) * GROUP + kv_head * GROUP + row
    best = tl.full([ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, WIDTH], tl.float32)
    for split in tl.range(first, end):
        part = result * splits + split
        next_best = tl.load(bests + part, mask=is_row, other=float("-inf"))
        next_mass = tl.load(masses + part, mask=is_row, other=0.0)
        next_total = tl.load(parts + part[:, None] * DIM + column[None, :], mask=is_real, other=0.0)
        best, mass, total = fold(best, mass, total, next_best, next_mass, next_total)
    place = result[:, None] * DIM + column[None, :]
    tl.store(out + place, divide(total, mass).to(out.dtype.element_ty), mask=is_real)
