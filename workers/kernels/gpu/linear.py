"""Products with the weight of a linear layer, in the dtype of the model or in int8.

Every output is one sum over the inputs in order, in the steps of the matrix units (16 inputs of bfloat16),
never split: so it has the same bits for any number of rows. cuBLAS takes another order for another batch
size. Tiles are chosen by the number of rows: they decide which program has an output, not how it is summed.
int8 codes go into the product as they are, exact in bfloat16, and the scale of an output multiplies its sum.

The torch form is `reference` below.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from workers.kernels.quantized import QuantizedWeight


class Tiles(NamedTuple):
    """Of one launch: a program has rows x columns outputs and goes through the inputs in steps."""

    rows: int  # a multiple of 64, what the matrix units of Hopper take
    columns: int
    inputs: int
    num_warps: int
    num_stages: int


# Decode reads weights and little else: many programs, and what each has under way fills the memory's latency.
_FEW = Tiles(rows=64, columns=32, inputs=128, num_warps=4, num_stages=4)
_SOME = Tiles(rows=64, columns=128, inputs=64, num_warps=4, num_stages=4)
_MANY = Tiles(rows=128, columns=256, inputs=64, num_warps=8, num_stages=3)
_WIDE = 16384  # outputs from which decode has programs enough with twice the columns
_SWIZZLE = 8  # tiles of rows that go through the weights together, so that these are in L2


def tiles_of(rows: int, columns: int, x: torch.dtype, weight: torch.dtype) -> Tiles:
    """For a product of so many rows with so many columns."""
    if x == torch.float32:  # takes all registers, and no second stage fits
        return Tiles(rows=64, columns=32, inputs=64, num_warps=4, num_stages=2)
    if rows > 512:
        return _MANY
    if rows > 64:
        return _SOME
    stages = 6 if weight == torch.int8 else 4
    return _FEW._replace(columns=64 if columns >= _WIDE else 32, num_stages=stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLinear:
    """A linear layer of one dtype of inputs."""

    weight: torch.Tensor  # (out, in), of that dtype or int8
    scales: torch.Tensor | None  # (out,) float32, of int8 only
    bias: torch.Tensor | None  # (out,)
    out_dtype: torch.dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., in) -> (..., out)."""
        out_features, in_features = self.weight.shape
        assert x.shape[-1] == in_features, (x.shape, self.weight.shape)
        rows = dense_rows(x)
        out = torch.empty((*x.shape[:-1], out_features), dtype=self.out_dtype, device=x.device)
        if out.numel():
            num_rows = rows.shape[0]
            tiles = tiles_of(num_rows, out_features, x.dtype, self.weight.dtype)
            _product[grid_of(num_rows, out_features, tiles)](
                *(rows, self.weight, self.scales, self.bias, out, num_rows, out_features, in_features),
                *(rows.stride(0), self.weight.stride(0)),
                *(tiles.rows, tiles.columns, tiles.inputs, _SWIZZLE, in_features % tiles.inputs == 0),
                num_warps=tiles.num_warps,
                num_stages=tiles.num_stages,
            )
        return out


def reference(weight: QuantizedWeight, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """What a quantized layer computes, in float32."""
    return F.linear(x.float(), weight.values(), None if bias is None else bias.float())


def grid_of(rows: int, columns: int, tiles: Tiles) -> tuple[int]:
    return (triton.cdiv(rows, tiles.rows) * triton.cdiv(columns, tiles.columns),)


def dense_rows(x: torch.Tensor) -> torch.Tensor:
    """x as (rows, n) with a dense last axis, without a copy where it can be."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


@triton.jit
def place_of(rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SWIZZLE: tl.constexpr):
    """First row and first column of this program: SWIZZLE tiles of rows at a time, column by column."""
    program = tl.program_id(0)
    row_tiles, column_tiles = tl.cdiv(rows, ROWS), tl.cdiv(columns, COLUMNS)
    band = SWIZZLE * column_tiles
    first = program // band * SWIZZLE
    height = tl.minimum(row_tiles - first, SWIZZLE)
    inside = program % band
    return (first + inside % height) * ROWS, inside // height * COLUMNS


@triton.jit
def store_sums(sums, scales, bias, out, row, column, rows, columns):
    """Sums (ROWS, COLUMNS), scaled and with the bias, where row and column are of the output."""
    is_column = column < columns
    if scales is not None:
        sums *= tl.load(scales + column, mask=is_column, other=0.0)[None, :]
    if bias is not None:
        sums += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    place = row.to(tl.int64)[:, None] * columns + column[None, :]
    is_real = (row < rows)[:, None] & is_column[None, :]
    tl.store(out + place, sums.to(out.dtype.element_ty), mask=is_real)


@triton.jit(do_not_specialize=["rows"])
def _product(
    x,
    weight,
    scales,
    bias,
    out,
    rows,
    columns,
    inputs,
    row_stride,
    weight_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INPUTS: tl.constexpr,
    SWIZZLE: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):
    first_row, first_column = place_of(rows, columns, ROWS, COLUMNS, SWIZZLE)
    row, column = first_row + tl.arange(0, ROWS), first_column + tl.arange(0, COLUMNS)
    step = tl.arange(0, INPUTS)
    is_row = (row < rows)[:, None]
    # Columns past the end read others again, and are not stored.
    x_place = x + row.to(tl.int64)[:, None] * row_stride + step[None, :]
    weight_place = weight + (column % columns).to(tl.int64)[None, :] * weight_stride + step[:, None]
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(0, inputs, INPUTS):
        if IS_WHOLE:
            left = tl.load(x_place + start, mask=is_row, other=0.0)
            right = tl.load(weight_place + start)
        else:
            is_input = start + step < inputs
            left = tl.load(x_place + start, mask=is_row & is_input[None, :], other=0.0)
            right = tl.load(weight_place + start, mask=is_input[:, None], other=0)
        sums = tl.dot(left, right.to(left.dtype), sums, input_precision="tf32x3")
    store_sums(sums, scales, bias, out, row, column, rows, columns)
