"""Norms and activations: what looks at one row at a time."""

from __future__ import annotations

import pytest
import torch

from tests.unit.kernels.gpu.support import DTYPES, REFERENCE, assert_close, noise
from workers.kernels.gpu.interpreter import DEVICE
from workers.kernels.gpu.kernels import GpuKernels

pytestmark = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.mark.parametrize("shape", [(0, 64), (1, 1), (1, 576), (3, 37), (21, 4096), (5, 3, 64), (2, 0, 8)])
def test_rms_norm(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, weight = (noise(*shape) * 3).to(dtype), noise(shape[-1], dtype=dtype)
    assert_close(GpuKernels(dtype).rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5))


def test_rms_norm_reads_heads_of_a_fused_row(dtype: torch.dtype) -> None:
    fused, weight = noise(4, 10 * 24, dtype=dtype), noise(24, dtype=dtype)
    heads = fused[:, 24 : 24 * 4].view(4, 3, 24)
    found = GpuKernels(dtype).rms_norm(heads, weight, 1e-6)
    assert_close(found, REFERENCE.rms_norm(heads.clone(), weight, 1e-6))


@pytest.mark.parametrize("shape", [(0, 64), (1, 576), (3, 37), (9, 128)])
def test_add_rms_norm(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x, residual, weight = (noise(*s, dtype=dtype, seed=i) for i, s in enumerate((shape, shape, shape[-1:])))
    wanted = REFERENCE.add_rms_norm(x, residual.clone(), weight, 1e-5)
    found = GpuKernels(dtype).add_rms_norm(x, residual.clone(), weight, 1e-5)
    assert_close(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])


@pytest.mark.parametrize("shape", [(0, 8), (5, 48), (2, 1000)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_layer_norm(dtype: torch.dtype, shape: tuple[int, int], has_bias: bool) -> None:
    x, weight = noise(*shape, dtype=dtype) + 2, noise(shape[1], dtype=dtype, seed=1)
    bias = noise(shape[1], dtype=dtype, seed=2) if has_bias else None
    found = GpuKernels(dtype).layer_norm(x, weight, bias, 1e-5)
    assert_close(found, REFERENCE.layer_norm(x, weight, bias, 1e-5))


@pytest.mark.parametrize("shape", [(0, 8), (1, 2), (3, 74), (2, 3072)])
def test_activations(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    own, x = GpuKernels(dtype), (noise(*shape) * 8).to(dtype)
    assert_close(own.silu_mul(x), REFERENCE.silu_mul(x))
    assert_close(own.gelu_new(x), REFERENCE.gelu_new(x))
    large = torch.tensor([[-3e38, 3e38, -100.0, 100.0, 1.0, 1.0, 1.0, 1.0]], device=DEVICE).to(dtype)
    assert_close(own.silu_mul(large), REFERENCE.silu_mul(large))
    assert_close(own.gelu_new(large), REFERENCE.gelu_new(large))


def test_a_row_has_the_same_bits_alone(dtype: torch.dtype) -> None:
    own, weight = GpuKernels(dtype), noise(72, dtype=dtype, seed=1)
    x, residual = noise(7, 72, dtype=dtype), noise(7, 72, dtype=dtype, seed=2)
    together = own.add_rms_norm(x, residual.clone(), weight, 1e-5)[0]
    for row in range(7):
        one = slice(row, row + 1)
        assert torch.equal(own.add_rms_norm(x[one], residual[one].clone(), weight, 1e-5)[0], together[one])
        assert torch.equal(own.rms_norm(x[one], weight, 1e-5), own.rms_norm(x, weight, 1e-5)[one])
        assert torch.equal(own.silu_mul(x[one]), own.silu_mul(x)[one])
