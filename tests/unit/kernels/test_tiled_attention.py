"""Attention in tile registers: real ones where the CPU has them, and those in software."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.unit.kernels.batches import make_batch, make_pool
from tests.unit.kernels.builds import CPU_FLAGS, HAS_AVX512_BF16, TILES, build
from workers.kernels import TorchKernels
from workers.kernels.native import CpuKernels

HAS_TILES = "amx_bf16" in CPU_FLAGS
BUILDS = [TILES] + ["native"] * HAS_TILES
REFERENCE = TorchKernels()
BF16 = torch.bfloat16
# Heads, kv heads, head size, block size: whole tiles, tails of every kind, more heads than a tile has rows.
SHAPES = [
    (9, 3, 64, 16),
    (8, 1, 80, 8),
    (7, 1, 40, 5),
    (2, 2, 96, 32),
    (20, 1, 128, 16),
    (4, 2, 256, 16),
    (2, 1, 2, 3),
]

pytestmark = pytest.mark.skipif(not HAS_AVX512_BF16, reason="tiles are built beside AVX512-BF16")


@pytest.fixture(params=BUILDS)
def own(request: pytest.FixtureRequest) -> CpuKernels:
    return CpuKernels(build(request.param), BF16)


@pytest.mark.parametrize("cap", [None, 4.0])
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "block_size"), SHAPES)
def test_close_to_the_reference(
    own: CpuKernels,
    heads: int,
    kv_heads: int,
    dim: int,
    block_size: int,
    window: int | None,
    cap: float | None,
) -> None:
    cache = make_pool(160, kv_heads, block_size, dim, BF16).layers[1]
    for mix in ([(0, 1)], [(5, 1), (200, 1), (63, 1), (64, 1)], [(0, 40), (129, 1), (30, 17)], [(100, 150)]):
        batch = make_batch(mix, block_size, 160)
        q = torch.randn(batch.positions.shape[0], heads, dim).to(BF16)
        found = own.paged_attention(q, cache, batch, dim**-0.5, window, cap)
        wanted = REFERENCE.paged_attention(q, cache, batch, dim**-0.5, window, cap)
        torch.testing.assert_close(found, wanted, rtol=1.6e-2, atol=1.6e-2)


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "block_size"), SHAPES)
def test_bits_know_neither_the_cut_nor_the_registers(
    heads: int, kv_heads: int, dim: int, block_size: int, window: int | None
) -> None:
    cache = make_pool(160, kv_heads, block_size, dim, BF16).layers[2]
    q = torch.randn(230, heads, dim).to(BF16)
    whole = make_batch([(0, 230)], block_size, 160)
    wanted = CpuKernels(build(TILES), BF16).paged_attention(q, cache, whole, 0.125, window)
    for name in BUILDS:
        kernels = CpuKernels(build(name), BF16)
        for start, stop in [(0, 230), (0, 1), (0, 33), (33, 100), (63, 64), (64, 69), (100, 229), (229, 230)]:
            piece = make_batch([(start, stop - start)], block_size, 160)
            found = kernels.paged_attention(q[start:stop], cache, piece, 0.125, window)
            assert torch.equal(found, wanted[start:stop]), (name, start, stop)


@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (20, 1)])
@pytest.mark.parametrize("start", [0, 40, 128])
def test_a_branch_of_a_tree_has_the_bits_of_a_sequence(
    own: CpuKernels, heads: int, kv_heads: int, start: int
) -> None:
    pool = make_pool(20, kv_heads, 16, 64, BF16)
    cache = pool.layers[0]
    parents = torch.tensor([-1, 0, 0, 1, 2, 2, 4, 4], dtype=torch.int32)
    q = torch.randn(8, heads, 64).to(BF16)
    batch = make_batch([(start, 8)], 16, 20)
    tree = replace(batch, parents=parents)
    found = own.paged_attention(q, cache, tree, 0.125, None)
    for row in range(8):
        path = [row]
        while parents[path[0]] >= 0:
            path.insert(0, int(parents[path[0]]))
        alone = pool.clone()
        for i, each in enumerate(path):
            to, come = ((batch.block_tables[0, (start + n) // 16], (start + n) % 16) for n in (i, each))
            alone.numbers[to[0], :, :, :, to[1]] = pool.numbers[come[0], :, :, :, come[1]]
        line = make_batch([(start, len(path))], 16, 20)
        wanted = own.paged_attention(q[path], alone.layers[0], line, 0.125, None)
        assert torch.equal(found[row], wanted[-1]), row


def test_large_scores_and_infinities(own: CpuKernels) -> None:
    cache = make_pool(20, 1, 16, 64, BF16).layers[0]
    batch = make_batch([(0, 100)], 16, 20)
    q = 300 * torch.randn(100, 2, 64).to(BF16)
    wanted = REFERENCE.paged_attention(q, cache, batch, 1.0, None)
    torch.testing.assert_close(
        own.paged_attention(q, cache, batch, 1.0, None), wanted, rtol=1.6e-2, atol=1.6e-2
    )
    q[7] = float("inf")
    found = own.paged_attention(q, cache, batch, 1.0, None)
    assert found.isnan().all(-1).all(-1).nonzero().flatten().tolist() == [7]
