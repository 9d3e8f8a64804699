"""Products with weights in the dtype of the model, in int8 and in int4."""

from __future__ import annotations

import pytest
import torch

from tests.unit.kernels.gpu.support import DTYPES, REFERENCE, assert_close, noise
from workers.kernels import Quantization
from workers.kernels.gpu.kernels import GpuKernels
from workers.kernels.gpu.linear import reference
from workers.kernels.quantized import quantize

FORMS = [Quantization.NONE, Quantization.INT8, Quantization.INT4]
SHAPES = [(0, 8, 16), (1, 1, 1), (1, 40, 64), (3, 33, 70), (65, 130, 192)]  # rows, out, in


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(("rows", "out_features", "in_features"), SHAPES)
def test_plain(dtype: torch.dtype, has_bias: bool, rows: int, out_features: int, in_features: int) -> None:
    x, weight = noise(rows, in_features, dtype=dtype), noise(out_features, in_features, dtype=dtype, seed=1)
    bias = noise(out_features, dtype=dtype, seed=2) if has_bias else None
    for out_dtype in (None, torch.float32):
        found = GpuKernels(dtype).pack_linear(weight, bias, out_dtype)(x)
        wide = None if bias is None else bias.float()
        wanted = torch.nn.functional.linear(x.float(), weight.float(), wide).to(out_dtype or dtype)
        assert_close(found, wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("quantization", FORMS[1:], ids=str)
@pytest.mark.parametrize(("rows", "out_features", "in_features"), SHAPES)
def test_quantized(
    dtype: torch.dtype, quantization: Quantization, rows: int, out_features: int, in_features: int
) -> None:
    x, weight = noise(rows, in_features, dtype=dtype), noise(out_features, in_features, dtype=dtype, seed=1)
    bias = noise(out_features, dtype=dtype, seed=2)
    found = GpuKernels(dtype).pack_linear(weight, bias, torch.float32, quantization)(x)
    if quantization is Quantization.INT8:
        wanted = reference(quantize(weight, quantization), x, bias)
    else:  # weights are rounded to the dtype
        linear = REFERENCE.pack_linear(weight, bias, quantization=quantization)
        wanted = torch.nn.functional.linear(x.float(), linear.weight.float(), bias.float())
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("quantization", FORMS, ids=str)
def test_a_row_has_the_same_bits_alone_and_in_any_batch(
    dtype: torch.dtype, quantization: Quantization
) -> None:
    """More than 64 rows, and more than 512, take other tiles."""
    linear = GpuKernels(dtype).pack_linear(noise(80, 320, dtype=dtype, seed=1), None, None, quantization)
    x = noise(520, 320, dtype=dtype)
    together = linear(x)
    for rows in (slice(0, 1), slice(33, 35), slice(519, 520), slice(3, 67), slice(200, 300)):
        assert torch.equal(linear(x[rows]), together[rows])


def test_rows_of_a_wider_tensor() -> None:
    x, weight = noise(4, 96, dtype=torch.bfloat16), noise(24, 32, dtype=torch.bfloat16, seed=1)
    linear = GpuKernels(torch.bfloat16).pack_linear(weight)
    assert torch.equal(linear(x[:, 32:64]), linear(x[:, 32:64].contiguous()))
    assert linear(x.view(2, 2, 96)[..., 32:64]).shape == (2, 2, 24)
