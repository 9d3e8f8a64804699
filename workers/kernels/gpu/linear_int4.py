"""Products with an int4 weight: codes of 4 bits, a scale and a minimum in half precision for 32 inputs.

A byte holds the codes of inputs i and i + 32 of a step of 64, so the two halves of a step are a group each
and nothing has to be interleaved. A weight becomes scale * code + minimum, rounded to the dtype of the model,
as in `TorchKernels.pack_linear`; then the product is that of `workers.kernels.gpu.linear`, and as independent
of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from workers.kernels.gpu.linear import Tiles, dense_rows, grid_of, place_of, store_sums
from workers.kernels.quantized import QuantizedWeight
from workers.weight_forms import GROUP

_STEP = 2 * GROUP  # inputs
_FEW = Tiles(rows=64, columns=32, inputs=_STEP, num_warps=4, num_stages=8)
_MANY = Tiles(rows=128, columns=64, inputs=_STEP, num_warps=8, num_stages=3)
_FEW_ROWS = 64
_SWIZZLE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLinearInt4:
    """A linear layer of one dtype of inputs."""

    packed: torch.Tensor  # (out, steps * 32) uint8
    scales: torch.Tensor  # (out, steps * 2) float16, as minima; 0 past the last input
    minima: torch.Tensor
    bias: torch.Tensor | None  # (out,)
    in_features: int
    offset: int  # codes before the first input, of which the weights have whole groups
    out_dtype: torch.dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., in) -> (..., out)."""
        assert x.shape[-1] == self.in_features, (x.shape, self.in_features)
        out_features = self.packed.shape[0]
        rows = dense_rows(F.pad(x, (self.offset, 0)) if self.offset else x)
        out = torch.empty((*x.shape[:-1], out_features), dtype=self.out_dtype, device=x.device)
        if out.numel():
            num_rows = rows.shape[0]
            tiles = _FEW if num_rows <= _FEW_ROWS else _MANY
            _product[grid_of(num_rows, out_features, tiles)](
                *(rows, self.packed, self.scales, self.minima, self.bias, out),
                *(num_rows, out_features, rows.shape[1]),
                *(rows.stride(0), self.packed.stride(0), self.scales.stride(0)),
                *(tiles.rows, tiles.columns, GROUP, _SWIZZLE),
                num_warps=tiles.num_warps,
                num_stages=2 if x.element_size() == 4 else tiles.num_stages,
            )
        return out


def pack_int4(weight: QuantizedWeight, bias: torch.Tensor | None, out_dtype: torch.dtype) -> GpuLinearInt4:
    """Two codes a byte; inputs are filled up to whole steps with weights of 0."""
    assert weight.minima is not None, "int8 codes"
    out_features, in_features = weight.codes.shape
    end = weight.offset + in_features
    codes = F.pad(weight.codes, (weight.offset, -end % _STEP)).view(out_features, -1, 2, GROUP)
    groups = codes.shape[1] * 2
    missing = (0, groups - weight.scales.shape[1])
    return GpuLinearInt4(
        packed=(codes[:, :, 0] | codes[:, :, 1] << 4).flatten(1).contiguous(),
        scales=F.pad(weight.scales, missing).contiguous(),
        minima=F.pad(weight.minima, missing).contiguous(),
        bias=bias,
        in_features=in_features,
        offset=weight.offset,
        out_dtype=out_dtype,
    )


@triton.jit(do_not_specialize=["rows"])
def _product(
    x,
    packed,
    scales,
    minima,
    bias,
    out,
    rows,
    columns,
    inputs,
    row_stride,
    packed_stride,
    group_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    SWIZZLE: tl.constexpr,
):
    first_row, first_column = place_of(rows, columns, ROWS, COLUMNS, SWIZZLE)
    row, column = first_row + tl.arange(0, ROWS), first_column + tl.arange(0, COLUMNS)
    step = tl.arange(0, GROUP)
    real_column = (column % columns).to(tl.int64)
    is_row = (row < rows)[:, None]
    x_place = x + row.to(tl.int64)[:, None] * row_stride
    packed_place = packed + real_column[None, :] * packed_stride + step[:, None]
    scale_place, minimum_place = scales + real_column * group_stride, minima + real_column * group_stride
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(0, inputs, 2 * GROUP):
        codes = tl.load(packed_place + start // 2)
        for half in tl.static_range(2):
            at = start + half * GROUP + step
            left = tl.load(x_place + at[None, :], mask=is_row & (at < inputs)[None, :], other=0.0)
            group = start // GROUP + half
            scale = tl.load(scale_place + group).to(tl.float32)[None, :]
            minimum = tl.load(minimum_place + group).to(tl.float32)[None, :]
            code = ((codes >> (4 * half)) & 15).to(tl.float32)
            right = (code * scale + minimum).to(left.dtype)
            sums = tl.dot(left, right, sums, input_precision="tf32x3")
    store_sums(sums, None, bias, out, row, column, rows, columns)
