"""Where the kept set of a row ends: order of logits as integers, and the search for a level."""

from __future__ import annotations

import triton
import triton.language as tl

MIN_LOGIT = tl.constexpr(-3.4028235e38)  # below it is only minus infinity: a forbidden id
LEVELS = tl.constexpr(16)  # of a pass of the search, with the one that is known


@triton.jit
def key_of(logits):
    """int64 in 0 .. 2**32 - 1, larger for larger logits; +0 and -0 are one."""
    bits = (logits + 0.0).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, ~bits, bits ^ -2147483648)
    return ordered.to(tl.int64) & 0xFFFFFFFF


@triton.jit
def logit_of(key):
    """The logit of a key."""
    ordered = key.to(tl.int32)
    return tl.where(key >= 2147483648, ordered ^ -2147483648, ~ordered).to(tl.float32, bitcast=True)


@triton.jit
def weight_of(logits, best, per_temperature):
    """Probability relative to the best id's."""
    return tl.where(logits < MIN_LOGIT, 0.0, tl.exp((logits - best) * per_temperature))


@triton.jit
def load_block(logits, block, vocab_size, BLOCK: tl.constexpr):
    """Logits of a block of a row, minus infinity past its end."""
    at = block * BLOCK + tl.arange(0, BLOCK)
    return tl.load(logits + at, mask=at < vocab_size, other=float("-inf"))


@triton.jit
def amounts_from(
    logits,
    bests,
    best,
    per_temperature,
    keys,
    vocab_size,
    blocks,
    NUMBER: tl.constexpr,
    BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """(NUMBER,) float64: count, or mass, of the ids whose key is at least each of `keys`."""
    least = tl.min(keys, axis=0)
    found = tl.zeros([NUMBER], tl.float64)
    for block in tl.range(0, blocks):
        if key_of(tl.load(bests + block)) >= least:
            values = load_block(logits, block, vocab_size, BLOCK)
            amount = tl.full([BLOCK], 1.0, tl.float32)
            if BY_MASS:
                amount = weight_of(values, best, per_temperature)
            is_from = key_of(values)[None, :] >= keys[:, None]
            found += tl.sum(tl.where(is_from, amount[None, :], 0.0), axis=1).to(tl.float64)
    return found


@triton.jit
def amount_above(
    logits, bests, best, per_temperature, key, vocab_size, blocks, BY_MASS: tl.constexpr, BLOCK: tl.constexpr
):
    """Count, or mass, of the ids whose key is larger."""
    keys = tl.zeros([1], tl.int64) + key + 1
    found = amounts_from(logits, bests, best, per_temperature, keys, vocab_size, blocks, 1, BY_MASS, BLOCK)
    return tl.sum(found, axis=0)


@triton.jit
def reached_by(bests, number, blocks, high, WIDTH: tl.constexpr):
    """A key that at least `number` ids reach: that of the best of so many blocks; 0 where there are fewer."""
    at = tl.arange(0, WIDTH)
    keys = key_of(tl.load(bests + at, mask=at < blocks, other=float("-inf")))
    low = high * 0
    if number <= blocks:
        while low < high:
            middle = low + (high - low + 1) // 2
            count = tl.sum(((keys >= middle) & (at < blocks)).to(tl.int32), axis=0)
            low = tl.where(count >= number, middle, low)
            high = tl.where(count >= number, high, middle - 1)
    return low


@triton.jit
def find_level(
    logits,
    bests,
    best,
    per_temperature,
    low,
    high,
    target,
    vocab_size,
    blocks,
    BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The largest key in low .. high at and above which there is `target` or more; low is known to be one."""
    place = tl.arange(0, LEVELS).to(tl.int64)
    while low < high:
        width = high - low
        keys = low + (width * place + (LEVELS - 2)) // (LEVELS - 1)
        found = amounts_from(
            logits, bests, best, per_temperature, keys, vocab_size, blocks, LEVELS, BY_MASS, BLOCK
        )
        is_enough = (found >= target) | (place == 0)
        reached = tl.max(tl.where(is_enough, place, 0), axis=0)
        next_place = reached + 1
        next_key = low + (width * next_place + (LEVELS - 2)) // (LEVELS - 1)
        high = tl.where(reached < LEVELS - 1, next_key - 1, high)
        low = low + (width * reached + (LEVELS - 2)) // (LEVELS - 1)
    return low
