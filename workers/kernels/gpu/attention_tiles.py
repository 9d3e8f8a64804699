"""Parts of the attention kernels: which rows a program has, one tile of keys, the fold of two splits.

Both kernels of `attention_kernels` are made of these, so that a row gets the same bits from either.
"""

from __future__ import annotations

import triton
import triton.language as tl

from workers.kernels.gpu.activation import tanh

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def find_tokens(query_starts, sequences, tile, TOKENS: tl.constexpr):
    """Sequence and its first token, start and end of query tile `tile`; no tokens where it has none.

    Sequence s has the tiles from query_starts[s] // TOKENS + s on: enough, and no host has to count them.
    """
    low, high = tl.full([], 0, tl.int32), sequences
    while low < high:  # the first sequence whose tiles begin after this one
        middle = (low + high) // 2
        if tl.load(query_starts + middle) // TOKENS + middle <= tile:
            low = middle + 1
        else:
            high = middle
    sequence = low - 1
    first = tl.load(query_starts + sequence)
    end = tl.load(query_starts + sequence + 1)
    start = first + (tile - (first // TOKENS + sequence)) * TOKENS
    return sequence, first, start, tl.minimum(start + TOKENS, end)


@triton.jit
def cells_of(at, start, before, index, depth, parents, TILE: tl.constexpr):
    """Where in its sequence the keys of positions `at` (TILE,), from `start` on, lie for a token of a tree.

    The tree begins at position `before`; the token is number `index` of it and has `depth` others to follow.
    Those lie at before + their numbers: for a chain at their positions, else found by way of `parents`.
    """
    cells = at
    if (start + TILE > before) & (index != depth):
        while depth >= 0:
            cells = tl.where(at == before + depth, before + index, cells)
            index = tl.load(parents + index)
            depth -= 1
    return cells


@triton.jit
def weigh_tile(
    queries,
    best,
    mass,
    total,
    at,
    cells,
    end,
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
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
):
    """Adds the keys at positions `at` (TILE,), below `end`, to the softmax of rows (ROWS,); cells (TILE,):
    where in their sequence they lie.

    best (ROWS,): largest score so far, in steps of log2; mass (ROWS,): sum of weights relative to it; total
    (ROWS, WIDTH): sum of weighted values. Pointers are those of this KV head.
    """
    column = tl.arange(0, WIDTH)
    is_in = at < end
    block = tl.load(table + cells // BLOCK_SIZE, mask=is_in, other=0).to(tl.int64)
    offset = cells % BLOCK_SIZE
    place = block * cache_block + offset * DIM
    # What is past the context counts for nothing, whatever it is: it is not read.
    is_key = is_in[None, :] & (column < DIM)[:, None]
    key = tl.load(keys + place[None, :] + column[:, None], mask=is_key, other=0)
    scores = tl.dot(queries, key.to(queries.dtype), input_precision="tf32x3") * scale
    if key_scales is not None:
        scale_place = block * scale_block + offset
        scores *= tl.load(key_scales + scale_place, mask=is_in, other=0.0).to(tl.float32)[None, :]
    if HAS_CAP:
        scores = cap * tanh(scores / cap)
    sees = is_in[None, :] & (at[None, :] <= position[:, None])
    if HAS_WINDOW:
        sees = sees & (at[None, :] > position[:, None] - window)
    scores = tl.where(sees, scores * _LOG2_E, float("-inf"))
    new_best = tl.maximum(best, tl.max(scores, axis=1))
    level = tl.where(new_best == float("-inf"), 0.0, new_best)
    weights = tl.exp2(scores - level[:, None])
    fade = tl.exp2(best - level)
    mass = tl.fma(mass, fade, tl.sum(weights, axis=1))
    if value_scales is not None:
        weights *= tl.load(value_scales + scale_place, mask=is_in, other=0.0).to(tl.float32)[None, :]
    is_value = is_in[:, None] & (column < DIM)[None, :]
    value = tl.load(values + place[:, None] + column[None, :], mask=is_value, other=0)
    total = tl.dot(
        weights.to(queries.dtype), value.to(queries.dtype), total * fade[:, None], input_precision="tf32x3"
    )
    return new_best, mass, total


@triton.jit
def fold(best, mass, total, next_best, next_mass, next_total):
    """The softmax of two runs of positions. One that saw nothing leaves the other one's bits as they are."""
    new_best = tl.maximum(best, next_best)
    level = tl.where(new_best == float("-inf"), 0.0, new_best)
    fade, next_fade = tl.exp2(best - level), tl.exp2(next_best - level)
    # Written out, so that a compiler has no choice of what it rounds.
    mass = tl.fma(mass, fade, next_mass * next_fade)
    fades = tl.broadcast_to(fade[:, None], total.shape)
    total = tl.fma(total, fades, next_total * next_fade[:, None])
    return new_best, mass, total


@triton.jit
def divide(total, mass):
    """Weighted values over the sum of weights; 0 for a row that saw nothing."""
    return total / tl.where(mass == 0.0, 1.0, mass)[:, None]
