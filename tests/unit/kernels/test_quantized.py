"""Weights of 8 and 4 bits: their values, and the C++ products with them against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.unit.kernels.builds import HAS_AVX512_BF16, MARCHES, build
from workers.kernels import (
    Quantization,
    SumOrder,
    TorchKernels,
    balanced,
    divide,
    kernels_for,
    one_leaf,
)
from workers.kernels.native import CpuKernels
from workers.kernels.packed import NativeLinear, WeightFormat
from workers.kernels.packed_quantized import quantized_format
from workers.kernels.quantized import quantize
from workers.weight_forms import GROUP

FORMS = [Quantization.INT8, Quantization.INT4]
SHAPES = [(16, 32), (64, 64), (1, 2), (200, 96), (65, 34), (576, 1536), (130, 250)]  # (out, in)
CPU = torch.device("cpu")
needs_packed = pytest.mark.skipif(not HAS_AVX512_BF16, reason="packed products need AVX512-BF16")


def make_weight(out_features: int, in_features: int) -> torch.Tensor:
    """Columns of different size and mean, as trained ones have."""
    size = torch.rand(out_features, 1) + 0.1
    return (size * torch.randn(out_features, in_features) + 0.1 * torch.randn(out_features, 1)).bfloat16()


def packed_linear(
    weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype, form: Quantization
) -> NativeLinear:
    linear = kernels_for(CPU, torch.bfloat16).pack_linear(weight, bias, out_dtype, form)
    assert isinstance(linear, NativeLinear)
    assert linear.format is quantized_format(linear.library, form)
    return linear


def test_int8_codes_are_the_nearest_of_255_steps() -> None:
    weight = torch.tensor([[1.27, -0.634, 0.005, 0.0], [0.0, 0.0, 0.0, 0.0]])
    found = quantize(weight, Quantization.INT8)
    assert found.codes.tolist() == [[127, -63, 0, 0], [0, 0, 0, 0]]
    torch.testing.assert_close(found.values()[0], torch.tensor([1.27, -0.63, 0.0, 0.0]))
    assert found.minima is None and found.scales.dtype == torch.float32


def test_int4_groups_have_a_step_and_a_minimum() -> None:
    weight = torch.cat((torch.arange(32) % 16 * 0.5 - 2, torch.full((10,), 3.0)))[None]
    found = quantize(weight, Quantization.INT4)
    assert found.codes.tolist() == [[*range(16), *range(16), *[0] * 10]]
    assert found.scales.tolist() == [[0.5, 0.0]] and found.minima is not None
    assert found.minima.tolist() == [[-2.0, 3.0]]
    assert torch.equal(found.values(), weight)


@pytest.mark.parametrize(("form", "steps"), [(Quantization.INT8, 254), (Quantization.INT4, 15)])
def test_no_value_is_further_than_half_a_step(form: Quantization, steps: int) -> None:
    weight = make_weight(50, 128)
    error = (quantize(weight, form).values() - weight.float()).abs()
    spread = 2 * weight.float().abs().amax(1, keepdim=True)
    # A thousandth more: scale and minimum of INT4 have 11 bits.
    assert bool((error <= spread / steps * 0.501 + spread / 2048).all())


def test_a_matrix_of_gguf_q4_1_gets_its_codes_back() -> None:
    """llama.cpp's quantize_row_q4_1: d = (max - min) / 15 as half; codes from the unrounded step."""
    values = torch.randn(300, 18, GROUP) * 0.04 + 0.002 * torch.randn(300, 18, 1)
    least, most = values.amin(2, keepdim=True), values.amax(2, keepdim=True)
    step = (most - least) / 15
    codes = ((values - least) / step + 0.5).floor().clamp(0, 15)
    stored = (codes * step.half().float() + least.half().float()).bfloat16().flatten(1)
    assert torch.equal(quantize(stored, Quantization.INT4).codes.float(), codes.flatten(1))


def test_weights_beyond_half_precision_are_refused() -> None:
    weight = torch.tensor([[-1e5, 0.0]])
    with pytest.raises(ValueError, match=r"weights from -1e\+05 to 0 are beyond what int4 holds .* use int8"):
        quantize(weight, Quantization.INT4)
    assert quantize(weight, Quantization.INT8).codes.tolist() == [[-127, 0]]


def rounded(x: torch.Tensor, linear: NativeLinear) -> torch.Tensor:
    """x (rows, in) bfloat16 as the packed products take it, in float64: in 8 bits with a scale for every 32;
    tiles take 16 bits with one scale."""
    is_tiled = linear.format is WeightFormat.INT8_TILES
    width, most = (x.shape[1], 127 * 256) if is_tiled else (GROUP, 127)
    groups = F.pad(x.float(), (0, -x.shape[1] % width)).unflatten(1, (-1, width))
    largest = groups.abs().amax(2, keepdim=True)
    inverse = torch.where(largest < 1e-30, 0.0, torch.full_like(largest, most) / largest)
    values = (groups * inverse).round().double() * (largest / most).double()
    return values.flatten(1)[:, : x.shape[1]]


@needs_packed
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
def test_products(form: Quantization, out_features: int, in_features: int) -> None:
    """Against the same values of weights and inputs in float64: only a float sum over groups differs."""
    weight, bias = make_weight(out_features, in_features), torch.randn(out_features).bfloat16()
    values = quantize(weight, form).values().double()
    linear = packed_linear(weight, bias, torch.float32, form)
    rounding = packed_linear(weight, bias, torch.bfloat16, form)
    for rows in (0, 1, 2, 3, 4, 5, 7, 33, 100):
        x = torch.randn(rows, in_features).bfloat16()
        found = linear(x)
        assert found.shape == (rows, out_features) and found.dtype == torch.float32
        error = (found - (rounded(x, linear) @ values.T + bias.double())).abs()
        sizes = x.double().abs() @ values.abs().T + bias.double().abs()
        assert bool((error <= sizes * (2 + in_features / GROUP) * 2**-22).all())
        assert torch.equal(rounding(x), found.bfloat16())


@needs_packed
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_an_outlier_costs_its_own_group_only(form: Quantization) -> None:
    weight, x = make_weight(64, 96), torch.randn(2, 96).bfloat16()
    linear = packed_linear(weight, None, torch.float32, form)
    values = quantize(weight, form).values().double()
    x[1, 40] = 1000.0
    error = (linear(x) - x.double() @ values.T).abs()
    if linear.format is WeightFormat.INT8_TILES:  # a group is as long as the row, a step smaller
        half_steps = x.double().abs().amax(1, keepdim=True) / (2 * 127 * 256)
        allowed = half_steps @ values.abs().sum(1)[None]
    else:
        half_steps = x.double().abs().unflatten(1, (-1, GROUP)).amax(2) / 254
        allowed = half_steps @ values.abs().unflatten(1, (-1, GROUP)).sum(2).T
    assert bool((error <= allowed * 1.01).all()) and float(half_steps[1, [0, -1]].max()) < 0.02


@needs_packed
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_row_does_not_see_its_neighbours_nor_the_threads(form: Quantization) -> None:
    linear = packed_linear(make_weight(200, 96), None, torch.float32, form)
    x = torch.randn(130, 96).bfloat16()
    whole = linear(x)
    for rows in (1, 2, 3, 4, 5, 32, 97):
        assert torch.equal(torch.cat([linear(part) for part in x.split(rows)]), whole), rows
    torch.set_num_threads(2)
    assert torch.equal(linear(x), whole) and torch.equal(linear(x[:1]), whole[:1])


@needs_packed
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_rows_of_any_size_and_strided(form: Quantization) -> None:
    weight = make_weight(48, 64)
    linear, values = packed_linear(weight, None, torch.float32, form), quantize(weight, form).values()
    x = torch.randn(6, 64)
    for size in (1e-20, 1.0, 1e20, 1e30):
        rows = (x * size).bfloat16()
        wanted = (rounded(rows, linear) / size @ values.double().T).float()
        torch.testing.assert_close(linear(rows) / size, wanted, atol=1e-5, rtol=1e-5)
    assert torch.equal(linear(torch.zeros(1, 64).bfloat16()), torch.zeros(1, 48))
    assert torch.equal(linear(torch.full((1, 64), 1e-38).bfloat16()), torch.zeros(1, 48))
    wide = torch.randn(5, 3, 100).bfloat16()
    assert torch.equal(linear(wide[..., 10:74]), linear(wide[..., 10:74].contiguous()))


@needs_packed
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_broken_activation_is_not_hidden(form: Quantization, value: float) -> None:
    linear = packed_linear(make_weight(48, 64), None, torch.float32, form)
    x = torch.randn(3, 64).bfloat16()
    wanted = linear(x)
    x[1, 5] = value
    found = linear(x)
    assert not bool(found[1].isfinite().any())
    assert torch.equal(found[[0, 2]], wanted[[0, 2]])


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_without_quantized_products_the_same_values_are_used(form: Quantization, dtype: torch.dtype) -> None:
    weight, bias = make_weight(48, 70).to(dtype), torch.randn(48).to(dtype)
    x = torch.randn(4, 70).to(dtype)
    values = quantize(weight, form).values().to(dtype)
    older = [CpuKernels(build(march), dtype) for march in MARCHES if march != "native"]
    for kernels in (TorchKernels(), *older):
        linear = kernels.pack_linear(weight, bias, torch.float32, form)
        plain = kernels.pack_linear(values, bias, torch.float32)
        assert type(linear) is type(plain) and torch.equal(linear(x), plain(x))


ORDERS = {
    "whole groups": balanced([one_leaf(64)] * 3),
    "borders inside groups": balanced([one_leaf(width) for width in (40, 24, 80, 6, 31)]),
    "nested": balanced([balanced([one_leaf(20)] * 3)] * 3),
}


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("inputs", [range(70), range(32, 64), range(33, 70), range(31, 33), range(40, 40)])
def test_a_part_is_quantized_as_in_the_whole(form: Quantization, inputs: range) -> None:
    weight = make_weight(50, 70)
    whole, found = quantize(weight, form), quantize(weight, form, inputs)
    span = slice(inputs.start, inputs.stop)
    for part in (found, whole.part(inputs)):
        assert torch.equal(part.codes, whole.codes[:, span])
        assert torch.equal(part.values(), whole.values()[:, span])


@needs_packed
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_products_follow_the_order(form: Quantization, order: SumOrder) -> None:
    """Each leaf as a product of its own, joined by torch; then in two parts."""
    kernels = kernels_for(CPU, torch.bfloat16)
    weight, bias = make_weight(200, order.num_inputs), torch.randn(200).bfloat16()
    x, whole = torch.randn(130, order.num_inputs).bfloat16(), quantize(weight, form)
    linear = kernels.pack_quantized(whole, bias, torch.bfloat16, torch.float32, order)
    sums: list[torch.Tensor] = []
    for span, joins in zip(order.spans, order.joins, strict=True):
        leaf = kernels.pack_quantized(whole.part(span), None, torch.bfloat16, torch.float32)
        total = leaf(x[:, span.start : span.stop])
        for _ in range(joins):
            total = sums.pop() + total
        sums.append(total)
    (wanted,) = sums
    half = len(order.widths) // 2
    parts, nodes = divide(order, [range(half), range(half, len(order.widths))])
    border = sum(order.widths[:half])
    for rows in (1, 4, 7, 33, 130):
        assert torch.equal(linear(x[:rows]), wanted[:rows] + bias.float()), rows
        found: list[torch.Tensor] = []
        for part, inputs in zip(parts, (range(border), range(border, order.num_inputs)), strict=True):
            held = kernels.pack_part(whole.part(inputs), torch.bfloat16, part)
            found += held.nodes(x[:rows, inputs.start : inputs.stop])
        stack: list[torch.Tensor] = []
        for total, joins in zip(found, nodes.joins, strict=True):
            for _ in range(joins):
                total = stack.pop() + total
            stack.append(total)
        assert len(stack) == 1 and torch.equal(stack[0], wanted[:rows]), rows
