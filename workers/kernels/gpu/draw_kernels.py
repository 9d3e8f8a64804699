"""The kernels of `workers.kernels.gpu.draw`, where the method is told."""

from __future__ import annotations

import triton
import triton.language as tl

from workers.kernels.gpu.draw_search import (
    amount_above,
    find_level,
    key_of,
    load_block,
    logit_of,
    reached_by,
    weight_of,
)

_NOT_FINITE = tl.constexpr(-1)  # workers.kernels.draw.NOT_FINITE
_FAR = tl.constexpr(2147483647)  # beyond any id


@triton.jit
def scan_block(logits, best, place, is_bad, stride, vocab_size, blocks, BLOCK: tl.constexpr):
    """Program (row, block): its largest logit, the lowest id that has it, and whether one is not finite."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    values = load_block(logits + row * stride, block, vocab_size, BLOCK)
    at = block * BLOCK + tl.arange(0, BLOCK)
    largest = tl.max(values, axis=0)
    bits = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    result = row * blocks + block
    tl.store(best + result, largest)
    tl.store(place + result, tl.min(tl.where(values == largest, at, vocab_size - 1), axis=0))
    tl.store(is_bad + result, tl.max(((bits >= 0x7F800000) & (at < vocab_size)).to(tl.int32), axis=0))


@triton.jit
def weigh_block(
    logits, draws, bests, mass, stride, vocab_size, blocks, BLOCK: tl.constexpr, WIDTH: tl.constexpr
):
    """Program (row, block): sum of weights. Greedy rows have none."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(draws + row * 5)
    if temperature > 0.0:
        at = tl.arange(0, WIDTH)
        best = tl.max(tl.load(bests + row * blocks + at, mask=at < blocks, other=float("-inf")), axis=0)
        values = load_block(logits + row * stride, block, vocab_size, BLOCK)
        weights = weight_of(values, best, (1.0 / temperature).to(tl.float32))
        tl.store(mass + row * blocks + block, tl.sum(weights, axis=0))


@triton.jit
def draw_row(
    logits,
    draws,
    bests,
    places,
    is_bad,
    mass,
    ids,
    stride,
    vocab_size,
    blocks,
    ONLY_FINITE: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Program (row): its id."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    bests += row * blocks
    at = tl.arange(0, WIDTH)
    is_block = at < blocks
    best_of = tl.load(bests + at, mask=is_block, other=float("-inf"))
    best = tl.max(best_of, axis=0)
    bad = tl.max(tl.load(is_bad + row * blocks + at, mask=is_block, other=0), axis=0)
    temperature, top_k = tl.load(draws + row * 5), tl.load(draws + row * 5 + 1)
    top_p, min_p = tl.load(draws + row * 5 + 2), tl.load(draws + row * 5 + 3)
    uniform = tl.load(draws + row * 5 + 4)
    has_top_k = (top_k > 0) & (top_k < vocab_size)
    if ONLY_FINITE and bad > 0:
        tl.store(ids + row, tl.full([], _NOT_FINITE, tl.int64))
    elif temperature == 0.0:
        first = tl.min(tl.where((best_of == best) & is_block, at, blocks - 1), axis=0)
        tl.store(ids + row, tl.load(places + row * blocks + first).to(tl.int64))
    else:
        per_temperature = (1.0 / temperature).to(tl.float32)
        sums = tl.load(mass + row * blocks + at, mask=is_block, other=0.0).to(tl.float64)
        if has_top_k | (top_p < 1.0) | (min_p > 0.0):
            found = _draw_filtered(
                logits, bests, best, per_temperature, tl.sum(sums, axis=0),
                top_k, has_top_k, top_p, min_p, uniform, vocab_size, blocks, BLOCK, WIDTH,
            )  # fmt: skip
        else:
            found = _draw_of_all(logits, best, per_temperature, sums, uniform, vocab_size, BLOCK, WIDTH)
        tl.store(ids + row, found.to(tl.int64))


@triton.jit
def _draw_of_all(
    logits, best, per_temperature, sums, uniform, vocab_size, BLOCK: tl.constexpr, WIDTH: tl.constexpr
):
    """Inverse of the cumulative distribution of all ids: by block, then inside."""
    at = tl.arange(0, WIDTH)
    ends = tl.cumsum(sums, axis=0)
    target = uniform * tl.max(ends, axis=0)
    last = tl.max(tl.where(sums > 0, at, 0), axis=0)
    block = tl.minimum(tl.sum((ends <= target).to(tl.int32), axis=0), last)
    before = tl.sum(tl.where(at < block, sums, 0.0), axis=0)
    weights = weight_of(load_block(logits, block, vocab_size, BLOCK), best, per_temperature)
    return _first_above(weights, before, target, block, BLOCK)[0]


@triton.jit
def _first_above(weights, before, target, block, BLOCK: tl.constexpr):
    """The first id of the block where the sum of weights, from `before` on, is above target, and whether
    there is one. Where there is none, by rounding: the last id with any weight."""
    ids = block * BLOCK + tl.arange(0, BLOCK)
    has_weight = weights > 0.0
    ends = before + tl.cumsum(weights.to(tl.float64), axis=0)
    first = tl.min(tl.where(has_weight & (ends > target), ids, _FAR), axis=0)
    last = tl.max(tl.where(has_weight, ids, 0), axis=0)
    return tl.where(first < _FAR, first, last), first < _FAR


@triton.jit
def _draw_filtered(
    logits,
    bests,
    best,
    per_temperature,
    total,
    top_k,
    has_top_k,
    top_p,
    min_p,
    uniform,
    vocab_size,
    blocks,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Of the kept ids: those above a level, and the first `ties` that are at it."""
    high = key_of(best)
    level = high * 0
    ties = tl.full([], _FAR, tl.float64)
    if has_top_k:
        lowest = reached_by(bests, top_k, blocks, high, WIDTH)
        level = find_level(
            logits, bests, best, per_temperature, lowest, high, top_k,
            vocab_size, blocks, False, BLOCK,
        )  # fmt: skip
        ties = top_k - amount_above(
            logits, bests, best, per_temperature, level, vocab_size, blocks, False, BLOCK
        )
        heavier = amount_above(logits, bests, best, per_temperature, level, vocab_size, blocks, True, BLOCK)
        total = heavier + ties * weight_of(logit_of(level), best, per_temperature).to(tl.float64)
    else:
        # Ids lighter than (1 - top_p) total / V have less than 1 - top_p of the mass together: the others
        # reach top_p without them. Those lighter than min_p are not kept. With a margin for rounding.
        least = tl.maximum((1.0 - top_p) * total / vocab_size, min_p).to(tl.float32)
        if least > 1e-30:
            bound = best + (tl.log(least) - 0.01) / per_temperature
            level = tl.minimum(key_of(bound - 1e-5 * tl.abs(best)), high)
    if top_p < 1.0:
        target = top_p * total
        heaviest = find_level(
            logits, bests, best, per_temperature, level, high, target, vocab_size, blocks, True, BLOCK
        )
        before = amount_above(logits, bests, best, per_temperature, heaviest, vocab_size, blocks, True, BLOCK)
        weight = weight_of(logit_of(heaviest), best, per_temperature).to(tl.float64)
        needed = tl.maximum(tl.ceil((target - before) / tl.maximum(weight, 1e-300)), 1.0)
        ties = tl.where(heaviest == level, tl.minimum(ties, needed), needed)
        level = heaviest
    left = tl.full([], 0.0, tl.float64)
    seen = tl.full([], 0.0, tl.float64)
    for block in tl.range(0, blocks):
        if key_of(tl.load(bests + block)) >= level:
            weights, seen = _kept(
                logits, block, best, per_temperature, level, ties, seen, min_p, vocab_size, BLOCK
            )
            left += tl.sum(weights.to(tl.float64), axis=0)
    target = uniform * left
    drawn = tl.full([], 0, tl.int32)
    before = tl.full([], 0.0, tl.float64)
    seen = tl.full([], 0.0, tl.float64)
    block = tl.full([], 0, tl.int32)
    while block < blocks:
        if key_of(tl.load(bests + block)) >= level:
            weights, seen = _kept(
                logits, block, best, per_temperature, level, ties, seen, min_p, vocab_size, BLOCK
            )
            mass = tl.sum(weights.to(tl.float64), axis=0)
            if mass > 0.0:
                drawn, is_found = _first_above(weights, before, target, block, BLOCK)
                before += mass
                block = tl.where(is_found, blocks, block)
        block += 1
    return drawn


@triton.jit
def _kept(logits, block, best, per_temperature, level, ties, seen, min_p, vocab_size, BLOCK: tl.constexpr):
    """Weights of a block's ids, 0 for those that are not kept, and how many at the level have been seen."""
    values = load_block(logits, block, vocab_size, BLOCK)
    weights = weight_of(values, best, per_temperature)
    keys = key_of(values)
    at_level = (keys == level).to(tl.int32)
    rank = seen + (tl.cumsum(at_level, axis=0) - at_level).to(tl.float64)
    is_kept = (keys > level) | ((at_level > 0) & (rank < ties))
    is_kept = is_kept & (weights.to(tl.float64) >= min_p)
    return tl.where(is_kept, weights, 0.0), seen + tl.sum(at_level, axis=0).to(tl.float64)
