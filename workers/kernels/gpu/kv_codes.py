"""Keys and values as int8 codes with one float16 scale a row: how a kernel rounds a row to them."""

from __future__ import annotations

import triton
import triton.language as tl

_ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2**23: float32 of this size has steps of 1, halves go to even
_HALF_MAX = tl.constexpr(65504.0)  # of float16
_INFINITY = tl.constexpr(0x7F800000)  # as bits of a float32


@triton.jit
def to_codes(x):
    """x (rows, d) float32 -> codes (rows, d) int8 and scales (rows,) float16.

    The scale is the least float16 that is no less than max |x| / 127. A row with a NaN or an infinity, or
    beyond what float16 holds, has NaN for its scale and codes of 0; a row of zeros has 0 for both.
    """
    largest = tl.max(tl.abs(x), axis=1)
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    step = tl.div_rn(largest, tl.full(largest.shape, 127.0, tl.float32))
    is_held = (tl.max(bits, axis=1) < _INFINITY) & (step <= _HALF_MAX)
    step = tl.where(is_held, step, 0.0)
    near = step.to(tl.float16)
    above = (near.to(tl.int16, bitcast=True) + 1).to(tl.float16, bitcast=True)
    scale = tl.where(near.to(tl.float32) < step, above, near)
    divisor = scale.to(tl.float32)
    has_codes = divisor > 0.0
    divided = tl.div_rn(x, tl.broadcast_to(tl.where(has_codes, divisor, 1.0)[:, None], x.shape))
    rounded = tl.where(has_codes[:, None], (divided + _ROUNDER) - _ROUNDER, 0.0)
    return rounded.to(tl.int8), tl.where(is_held, scale, float("nan")).to(tl.float16)
