"""Products of int8 weights in tile registers: to the bit, from registers in software and from real ones."""

from __future__ import annotations

import pytest
import torch

from tests.unit.kernels.builds import CPU_FLAGS, HAS_AVX512_BF16, TILES, build
from workers.kernels import Quantization, SumOrder, balanced, divide, one_leaf
from workers.kernels.native import CpuKernels
from workers.kernels.packed import NativeLinear, WeightFormat
from workers.kernels.quantized import QuantizedWeight, quantize

pytestmark = pytest.mark.skipif(not HAS_AVX512_BF16, reason="tiles are built beside AVX512-BF16")
BUILDS = [TILES] + ["native"] * ("amx_bf16" in CPU_FLAGS)
MOST = 2048  # inputs that share a scale of a row
ORDERS = {  # whole tiles, half ones, odd ends, leaves of several groups
    "one leaf": one_leaf(576),
    "half a tile": one_leaf(96),
    "odd": one_leaf(75),
    "one input": one_leaf(1),
    "leaves": balanced([one_leaf(width) for width in (64, 32, 33, 128, 7, 100)]),
    "long leaves": balanced([one_leaf(width) for width in (MOST + 40, 2 * MOST, 70)]),
}
ROWS = [1, 2, 7, 8, 9, 16, 17, 24, 33, 97]


def codes(out_features: int, in_features: int) -> QuantizedWeight:
    size = torch.rand(out_features, 1) + 0.1
    return quantize(size * torch.randn(out_features, in_features), Quantization.INT8)


def tiled_linear(
    name: str, weight: QuantizedWeight, order: SumOrder, bias: torch.Tensor | None = None
) -> NativeLinear:
    kernels = CpuKernels(build(name), torch.bfloat16)
    linear = kernels.pack_quantized(weight, bias, torch.bfloat16, torch.float32, order)
    assert isinstance(linear, NativeLinear) and linear.format is WeightFormat.INT8_TILES
    return linear


def in_tile_order(x: torch.Tensor, weight: QuantizedWeight, order: SumOrder) -> torch.Tensor:
    """x (rows, in) bfloat16 * weight, float32, with the roundings of cpu/gemm_int8_tiles.h."""
    sums: list[torch.Tensor] = []
    for leaf, joins in zip(order.spans, order.joins, strict=True):
        total = torch.zeros(x.shape[0], weight.codes.shape[0])
        for start in range(leaf.start, leaf.stop, MOST):
            span = slice(start, min(start + MOST, leaf.stop))
            values, weights = x[:, span].float(), weight.codes[:, span].double()
            largest = values.abs().amax(1, keepdim=True)
            both = (values * (torch.full_like(largest, 127 * 256) / largest)).round()
            upper = ((both + 128) / 256).floor()
            lower = both - 256 * upper
            assert float(lower.abs().max()) <= 128 and float(upper.abs().max()) <= 127
            high, low = ((part.double() @ weights.T).float() for part in (upper, lower))
            # Exact in double: one rounding of product and sum, as the instruction has it.
            product = (high.double() * 256 + low.double()).float()
            total = (product.double() * (largest / (127 * 256)).double() + total.double()).float()
        total = total * weight.scales
        for _ in range(joins):
            total = sums.pop() + total
        sums.append(total)
    (found,) = sums
    return found


@pytest.mark.parametrize("name", BUILDS)
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("out_features", [1, 64, 130])
def test_bits_at_every_border(name: str, order: SumOrder, out_features: int) -> None:
    weight, bias = codes(out_features, order.num_inputs), torch.randn(out_features).bfloat16()
    linear = tiled_linear(name, weight, order, bias)
    x = torch.randn(max(ROWS), order.num_inputs + 6).bfloat16()[:, : order.num_inputs]
    wanted = in_tile_order(x, weight, order) + bias.float()
    for rows in ROWS:
        assert torch.equal(linear(x[:rows]), wanted[:rows]), rows
        assert torch.equal(linear(x[-rows:]), wanted[-rows:]), rows


@pytest.mark.parametrize("name", BUILDS)
@pytest.mark.parametrize("border", [1, 2, 3, 5])
@pytest.mark.parametrize("rows", [1, 2, 33])
def test_two_ranks_have_the_bits_of_one(name: str, border: int, rows: int) -> None:
    order = ORDERS["leaves"]
    weight, x = codes(130, order.num_inputs), torch.randn(rows, order.num_inputs).bfloat16()
    wanted = in_tile_order(x, weight, order)
    parts, nodes = divide(order, [range(border), range(border, len(order.widths))])
    cut = sum(order.widths[:border])
    found: list[torch.Tensor] = []
    for part, inputs in zip(parts, (range(cut), range(cut, order.num_inputs)), strict=True):
        held = CpuKernels(build(name), torch.bfloat16).pack_part(weight.part(inputs), torch.bfloat16, part)
        found += held.nodes(x[:, inputs.start : inputs.stop])
    sums: list[torch.Tensor] = []
    for total, joins in zip(found, nodes.joins, strict=True):
        for _ in range(joins):
            total = sums.pop() + total
        sums.append(total)
    assert len(sums) == 1 and torch.equal(sums[0], wanted)


@pytest.mark.parametrize("name", BUILDS)
def test_the_largest_sums_are_exact(name: str) -> None:
    """All products at their largest: far from where int32 ends, as long leaves have several groups."""
    order = one_leaf(16 * MOST)
    weight = QuantizedWeight(
        codes=torch.full((32, order.num_inputs), -127, dtype=torch.int8), scales=torch.ones(32), minima=None
    )
    x = torch.full((3, order.num_inputs), 255.0).bfloat16()
    x[1] = -256.0
    linear = tiled_linear(name, weight, order)
    found = linear(x)
    wanted = x.double() @ weight.values().double().T
    assert float(((found - wanted) / wanted).abs().max()) < 1e-6
    assert torch.equal(linear(x[:2]), found[:2])


@pytest.mark.parametrize("name", BUILDS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_spoils_its_row_alone(name: str, value: float) -> None:
    order = ORDERS["leaves"]
    linear = tiled_linear(name, codes(48, order.num_inputs), order)
    x = torch.randn(20, order.num_inputs).bfloat16()
    x[7] = 0.0
    wanted = linear(x)
    x[1, 130] = value
    found, rest = linear(x), [i for i in range(20) if i != 1]
    assert not bool(found[1].isfinite().any()) and not bool(linear(x[1:2]).isfinite().any())
    assert torch.equal(found[rest], wanted[rest]) and torch.equal(found[7], torch.zeros(48))


@pytest.mark.parametrize("name", BUILDS)
def test_two_threads_give_the_bits_of_one(name: str) -> None:
    order = ORDERS["leaves"]
    linear = tiled_linear(name, codes(200, order.num_inputs), order)
    x = torch.randn(130, order.num_inputs).bfloat16()
    wanted = linear(x)
    torch.set_num_threads(2)
    assert torch.equal(linear(x), wanted)
    assert torch.equal(linear(x[:1]), wanted[:1])
