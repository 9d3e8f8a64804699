"""RMS norm and layer norm of rows: a whole row in registers, computed in float32.

The torch form is `TorchKernels.rms_norm`, `add_rms_norm` and `layer_norm`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from workers.kernels.gpu.tiles import warps_of, width_of

_SHORT_ROW = 256  # rows up to this, as of one head, share a program
_ROWS = 4  # that do


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x (..., n) with a dense last axis, weight (n,): in a new dense tensor."""
    assert weight.shape == x.shape[-1:] and weight.is_contiguous(), (x.shape, weight.shape)
    if x.dim() > 3 or x.stride(-1) != 1:
        x = x.contiguous()
    heads = x if x.dim() == 3 else x.reshape(-1, 1, x.shape[-1])
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(heads, None, weight, out, eps)
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm of x + residual, x + residual), all (T, n); the sum is in the memory of `residual`."""
    assert x.shape == residual.shape and x.dtype == residual.dtype, (x.shape, residual.shape, residual.dtype)
    x, residual = x.contiguous(), residual.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x[:, None], residual, weight, out, eps)
    return out, residual


def _launch(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, out: torch.Tensor, eps: float
) -> None:
    """x (outer, inner, n); residual and out have its rows, dense."""
    outer, inner, size = x.shape
    if x.numel() == 0:
        return
    width = width_of(size)
    rows = _ROWS if width <= _SHORT_ROW else 1
    _rms_norm[(triton.cdiv(outer * inner, rows),)](
        *(x, residual, weight, out, outer * inner, inner, x.stride(0), x.stride(1), size, eps),
        ROWS=rows,
        WIDTH=width,
        num_warps=warps_of(rows * width),
    )


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """x (T, n), weight and bias (n,)."""
    assert weight.shape == x.shape[-1:] and weight.is_contiguous(), (x.shape, weight.shape)
    x = x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        size, width = x.shape[-1], width_of(x.shape[-1])
        _layer_norm[(x.numel() // size,)](
            x, weight, bias, out, size, eps, WIDTH=width, num_warps=warps_of(width)
        )
    return out


@triton.jit(do_not_specialize=["rows"])
def _rms_norm(
    x,
    residual,
    weight,
    out,
    rows,
    inner,
    outer_stride,
    inner_stride,
    size,
    eps,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    is_real = (row < rows)[:, None] & (column < size)[None, :]
    place = (row // inner * outer_stride + row % inner * inner_stride)[:, None] + column[None, :]
    dense = row[:, None] * size + column[None, :]
    values = tl.load(x + place, mask=is_real, other=0.0)
    if residual is not None:
        # Rounded to the dtype of the model before the norm, as what goes on in the residual stream.
        added = values.to(tl.float32) + tl.load(residual + dense, mask=is_real, other=0.0).to(tl.float32)
        values = added.to(residual.dtype.element_ty)
        tl.store(residual + dense, values, mask=is_real)
    wide = values.to(tl.float32)
    shrink = tl.rsqrt(tl.sum(wide * wide, axis=1) / size + eps)
    gain = tl.load(weight + column, mask=column < size, other=0.0).to(tl.float32)
    normed = wide * shrink[:, None] * gain[None, :]
    tl.store(out + dense, normed.to(out.dtype.element_ty), mask=is_real)


@triton.jit
def _layer_norm(x, weight, bias, out, size, eps, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    is_real = column < size
    wide = tl.load(x + row * size + column, mask=is_real, other=0.0).to(tl.float32)
    centred = tl.where(is_real, wide - tl.sum(wide, axis=0) / size, 0.0)
    shrink = tl.rsqrt(tl.sum(centred * centred, axis=0) / size + eps)
    normed = centred * shrink * tl.load(weight + column, mask=is_real, other=0.0).to(tl.float32)
    if bias is not None:
        normed += tl.load(bias + column, mask=is_real, other=0.0).to(tl.float32)
    tl.store(out + row * size + column, normed.to(out.dtype.element_ty), mask=is_real)
