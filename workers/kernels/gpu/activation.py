"""Nonlinear functions of the MLP, computed in float32.

The torch form is `TorchKernels.silu_mul` and `gelu_new`; other functions are torch's own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_WIDTH = 1024  # columns of a program


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """SiLU(gate) * up for gate_up (T, 2 n) = [gate | up]: (T, n)."""
    return _launch(gate_up, gate_up.shape[-1] // 2, is_gated=True)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """GELU of x (..., n), by its approximation with tanh."""
    return _launch(x, x.shape[-1] if x.dim() else 1, is_gated=False)


def _launch(x: torch.Tensor, size: int, *, is_gated: bool) -> torch.Tensor:
    out = torch.empty((*x.shape[:-1], size), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    rows = x.reshape(-1, x.shape[-1])
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    _activate[(rows.shape[0], triton.cdiv(size, _WIDTH))](
        *(rows, out, rows.stride(0), size),
        IS_GATED=is_gated,
        WIDTH=_WIDTH,
        num_warps=4,
    )
    return out


@triton.jit
def tanh(x):
    """Within 2e-7 of the exact one, and right for any x: the exponential may overflow."""
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def _activate(x, out, stride, size, IS_GATED: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    is_real = column < size
    value = tl.load(x + row * stride + column, mask=is_real, other=0.0).to(tl.float32)
    if IS_GATED:
        value = value / (1.0 + tl.exp(-value))
        value *= tl.load(x + row * stride + size + column, mask=is_real, other=0.0).to(tl.float32)
    else:
        inner = 0.7978845608028654 * (value + 0.044715 * value * value * value)
        value = 0.5 * value * (1.0 + tanh(inner))
    tl.store(out + row * size + column, value.to(out.dtype.element_ty), mask=is_real)
