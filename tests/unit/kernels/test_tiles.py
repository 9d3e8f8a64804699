"""Products in tile registers: the bits of AMX, from registers in software.

Real ones are tested too where the CPU has them; elsewhere they are only compiled.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path

import pytest
import torch

from tests.unit.kernels.builds import CPU_FLAGS, HAS_AVX512_BF16, TILE_BUILDS, build
from workers.kernels import Quantization, SumOrder, balanced, one_leaf
from workers.kernels.compiler import default_cache, library
from workers.kernels.native import CpuKernels
from workers.kernels.packed import NativeLinear, WeightFormat
from workers.kernels.quantized import quantize

needs_vectors = pytest.mark.skipif(not HAS_AVX512_BF16, reason="tiles are built beside AVX512-BF16")
SHAPES = [(64, 32), (1, 2), (50, 64), (130, 74), (192, 30), (200, 576)]  # (out, in)
ROWS = [1, 2, 15, 16, 17, 31, 32, 33, 48, 50, 96, 97, 130]


def tiled_linear(name: str, weight: torch.Tensor, bias: torch.Tensor | None = None) -> NativeLinear:
    linear = CpuKernels(build(name), torch.bfloat16).pack_linear(weight, bias, torch.float32)
    assert isinstance(linear, NativeLinear) and linear.format is WeightFormat.BF16_TILES
    return linear


def in_tile_order(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x (rows, in) * weight (out, in), float32: tiles of 32 inputs in order, in each even and odd ones apart.

    A product of two bf16 numbers is exact.
    """
    x, weight = x.float(), weight.float()
    total = torch.zeros(x.shape[0], weight.shape[0])
    for first in range(0, x.shape[1], 32):
        sums = torch.zeros(2, *total.shape)
        for k in range(first, min(first + 32, x.shape[1])):
            sums[k % 2] += x[:, k, None] * weight[:, k]
        total += sums[0] + sums[1]
    return total


@needs_vectors
@pytest.mark.parametrize("name", TILE_BUILDS)
@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
def test_bits_of_the_instruction_at_every_border(name: str, out_features: int, in_features: int) -> None:
    weight = (torch.randn(out_features, in_features) / in_features**0.5).bfloat16()
    bias = torch.randn(out_features).bfloat16()
    linear = tiled_linear(name, weight, bias)
    x = torch.randn(max(ROWS), in_features + 6).bfloat16()[:, :in_features]
    wanted = in_tile_order(x, weight) + bias.float()
    for rows in ROWS:
        assert torch.equal(linear(x[:rows]), wanted[:rows]), rows
        assert torch.equal(linear(x[-rows:]), wanted[-rows:]), rows


@needs_vectors
@pytest.mark.parametrize("name", TILE_BUILDS)
def test_denormals_are_zero_going_in_and_out(name: str) -> None:
    tiny, small, one = 2.0**-130, 2.0**-70, 1.0
    weight = torch.tensor([[one, 0.0], [2.0**100, 0.0], [small, 0.0], [-(2.0**-56), 0.0]]).bfloat16()
    found = tiled_linear(name, weight)(torch.tensor([[tiny, one], [small, one]]).bfloat16())
    assert found.tolist() == [[0.0, 0.0, 0.0, 0.0], [small, 2.0**30, 0.0, -(2.0**-126)]]


@needs_vectors
@pytest.mark.parametrize("name", TILE_BUILDS)
def test_two_threads_give_the_bits_of_one(name: str) -> None:
    linear, x = tiled_linear(name, torch.randn(200, 96).bfloat16()), torch.randn(130, 96).bfloat16()
    wanted = linear(x)
    torch.set_num_threads(2)
    assert torch.equal(linear(x), wanted)


INT4_ORDERS = {
    "one leaf": one_leaf(576),
    "odd": one_leaf(70),
    "leaves": balanced([one_leaf(width) for width in (40, 288, 80, 6, 31)]),
    "nested": balanced([balanced([one_leaf(32)] * 3)] * 3),
}


@needs_vectors
@pytest.mark.parametrize("name", TILE_BUILDS)
@pytest.mark.parametrize("out_features", [1, 64, 130])
@pytest.mark.parametrize("order", INT4_ORDERS.values(), ids=INT4_ORDERS)
def test_int4_has_the_bits_of_single_rows(name: str, out_features: int, order: SumOrder) -> None:
    """Few rows are multiplied by vectors, 32 and more by tiles."""
    kernels = CpuKernels(build(name), torch.bfloat16)
    weight = quantize(torch.randn(out_features, order.num_inputs).bfloat16(), Quantization.INT4)
    linear = kernels.pack_quantized(weight, None, torch.bfloat16, torch.float32, order)
    x = torch.randn(max(ROWS), order.num_inputs).bfloat16()
    wanted = torch.cat([linear(row) for row in x.split(1)])
    for rows in (*ROWS, *range(34, 48)):
        assert torch.equal(linear(x[:rows]), wanted[:rows]), rows
        assert torch.equal(linear(x[-rows:]), wanted[-rows:]), rows


@pytest.fixture(scope="module")
def amx_build() -> Path:
    """What a machine with AMX builds; it cannot be used on others."""
    return library(default_cache(), march="sapphirerapids")


def test_a_machine_with_amx_gets_its_instructions(amx_build: Path) -> None:
    command = ["objdump", "--disassemble", "--no-show-raw-insn", str(amx_build)]
    code = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    found = set(re.findall(r"\t(ldtilecfg|tile\w+|tdp\w+)\b", code))
    moves = {"ldtilecfg", "tilerelease", "tilezero", "tileloadd", "tilestored"}
    assert found == moves | {"tdpbf16ps", "tdpbssd"}
    # C += A * B, last operand first: no other pairing of registers.
    linear = {("6", "4", "0"), ("7", "4", "1"), ("6", "5", "2"), ("7", "5", "3")}
    int4 = {(str(6 + c % 2), a, str(c)) for c in range(4) for a in "45"}
    values = {("7", "5", str(c)) for c in range(4)} | {("7", "6", "4")}  # of attention
    scores = {("2", "6", "0"), ("2", "7", "1"), ("6", "5", "3"), ("7", "5", "4")}
    for product, wanted in {"tdpbf16ps": linear | values | scores, "tdpbssd": linear | int4}.items():
        assert set(re.findall(product + r" %tmm(\d),%tmm(\d),%tmm(\d)", code)) == wanted


def test_tiles_are_used_only_where_the_cpu_has_them(amx_build: Path) -> None:
    assert bool(ctypes.CDLL(str(amx_build)).tandem_can_use_tiles()) == ("amx_bf16" in CPU_FLAGS)
    assert build("native").can_use_tiles == ("amx_bf16" in CPU_FLAGS)
