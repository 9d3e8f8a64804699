"""The C++ kernels over int8 keys and values against their torch reference, which dequantizes."""

from __future__ import annotations

import math

import pytest
import torch

from tests.unit.kernels.batches import make_batch, make_pool
from tests.unit.kernels.builds import MARCHES, build
from workers.kernels import Kernels, LayerCache, TorchKernels
from workers.kernels.native import CpuKernels
from workers.kernels.paged_cache import quantize_rows

REFERENCE = TorchKernels()
MIXES = [
    [(0, 1)],
    [(5, 1), (200, 1), (63, 1), (64, 1)],
    [(0, 40), (129, 1), (30, 17), (0, 1)],
    [(100, 70)],
]


@pytest.fixture(
    params=[(march, dtype) for march in MARCHES for dtype in (torch.float32, torch.bfloat16)], ids=str
)
def kernels(request: pytest.FixtureRequest) -> tuple[Kernels, torch.dtype]:
    march, dtype = request.param
    return CpuKernels(build(march), dtype), dtype


def assert_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    tolerance = 2e-5 if found.dtype == torch.float32 else 1.6e-2
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rotary", [None, 16, 24])
@pytest.mark.parametrize("mix", [[], *MIXES])
def test_rows_are_written_as_the_reference_quantizes_them(
    kernels: tuple[Kernels, torch.dtype], rotary: int | None, mix: list[tuple[int, int]]
) -> None:
    own, dtype = kernels
    heads, kv_heads, dim, block_size = 6, 2, 24, 8
    batch = make_batch(mix, block_size, 60)
    tokens = batch.positions.shape[0]
    k, v = (torch.randn(tokens, kv_heads, dim).to(dtype) for _ in range(2))
    q = k.repeat(1, heads // kv_heads, 1)  # turned as the keys are
    before = k.clone(), v.clone()
    angles = None if rotary is None else torch.rand(tokens, rotary // 2) * 6
    cos, sin = (None, None) if angles is None else (angles.cos(), angles.sin())
    pool = make_pool(60, kv_heads, block_size, dim, torch.int8)
    expected = pool.clone()
    turned = own.rotary_and_write(q, k, v, cos, sin, batch, pool.layers[1])
    assert torch.equal(k, before[0]) and torch.equal(v, before[1])
    REFERENCE.rotary_and_write(turned, turned[:, :kv_heads], v, None, None, batch, expected.layers[1])
    assert torch.equal(pool.memory, expected.memory)


def test_rows_of_every_size_are_written_alike(kernels: tuple[Kernels, torch.dtype]) -> None:
    own, dtype = kernels
    batch, pool = make_batch([(0, 40)], 8, 6), make_pool(6, 1, 8, 16, torch.int8)
    sizes = 10.0 ** torch.linspace(-10, 8, 40)
    rows = (torch.randn(40, 1, 16) * sizes[:, None, None]).to(dtype)
    rows[3] = 0
    rows[5, 0, 2], rows[6, 0, 9], rows[7, 0, 15] = math.nan, math.inf, -math.inf
    own.rotary_and_write(rows.clone(), rows, -rows, None, None, batch, pool.layers[0])
    slots, cache = batch.slots, pool.layers[0]
    codes, scales = quantize_rows(rows)
    assert scales.isnan().sum() >= 4
    assert cache.key_scales is not None and cache.value_scales is not None
    for found, sign in ((cache.keys, 1), (cache.values, -1)):
        assert torch.equal(found[slots // 8, :, slots % 8], sign * codes)
    for found in (cache.key_scales, cache.value_scales):
        torch.testing.assert_close(found[slots // 8, :, slots % 8], scales, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("window", [None, 1, 50])
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block_size"),
    [(9, 3, 64, 16), (4, 4, 8, 32), (8, 1, 80, 8), (7, 1, 40, 6), (2, 2, 7, 4), (3, 1, 196, 16)],
)
def test_paged_attention(
    kernels: tuple[Kernels, torch.dtype],
    heads: int,
    kv_heads: int,
    dim: int,
    block_size: int,
    mix: list[tuple[int, int]],
    window: int | None,
) -> None:
    own, dtype = kernels
    batch = make_batch(mix, block_size, 120)
    cache = make_pool(120, kv_heads, block_size, dim, torch.int8).layers[1]
    q = torch.randn(batch.positions.shape[0], heads + 1, dim).to(dtype)[:, :heads]
    found = own.paged_attention(q, cache, batch, dim**-0.5, window)
    assert_close(found, REFERENCE.paged_attention(q, cache, batch, dim**-0.5, window))


def test_attention_of_more_heads_than_a_tile(kernels: tuple[Kernels, torch.dtype]) -> None:
    own, dtype = kernels
    batch, cache = make_batch([(0, 3), (20, 1)], 16, 8), make_pool(8, 1, 16, 16, torch.int8).layers[0]
    q = torch.randn(4, 100, 16).to(dtype)
    found = own.paged_attention(q, cache, batch, 0.25, None)
    assert_close(found, REFERENCE.paged_attention(q, cache, batch, 0.25, None))


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(9, 3, 64), (7, 1, 64), (9, 1, 32), (2, 2, 96), (6, 3, 20)]
)
def test_a_row_knows_neither_neighbours_nor_cuts(
    kernels: tuple[Kernels, torch.dtype], heads: int, kv_heads: int, dim: int, window: int | None
) -> None:
    own, dtype = kernels
    cache = make_pool(120, kv_heads, 16, dim, torch.int8).layers[2]
    q = torch.randn(150, heads, dim).to(dtype)
    wanted = own.paged_attention(q, cache, make_batch([(0, 150)], 16, 120), 0.125, window)
    for start, stop in [(0, 1), (0, 33), (33, 100), (100, 102), (102, 149), (149, 150)]:
        piece = make_batch([(start, stop - start)], 16, 120)
        found = own.paged_attention(q[start:stop], cache, piece, 0.125, window)
        assert torch.equal(found, wanted[start:stop])


@pytest.mark.parametrize("dim", [24, 64])
@pytest.mark.parametrize("start", [3, 70])
def test_nothing_past_the_context_counts(kernels: tuple[Kernels, torch.dtype], start: int, dim: int) -> None:
    own, dtype = kernels
    batch, clean = make_batch([(start, 2), (0, 1)], 16, 8), make_pool(8, 2, 16, dim, torch.int8)
    dirty = clean.clone()
    dirty.memory.fill_(0xFF)  # codes of -1, scales that are not a number
    assert clean.scales is not None and dirty.scales is not None
    for s, length in enumerate(batch.context_lens.tolist()):
        for position in range(length):
            block, offset = int(batch.block_tables[s, position // 16]), position % 16
            dirty.numbers[block, :, :, :, offset] = clean.numbers[block, :, :, :, offset]
            dirty.scales[block, :, :, :, offset] = clean.scales[block, :, :, :, offset]
    q = torch.randn(3, 4, dim).to(dtype)
    for each in (own, REFERENCE):
        found, wanted = (each.paged_attention(q, pool.layers[0], batch, 0.2, None) for pool in (dirty, clean))
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("broken", ["key_scales", "value_scales"])
def test_a_broken_row_or_query_is_not_hidden(kernels: tuple[Kernels, torch.dtype], broken: str) -> None:
    own, dtype = kernels
    batch, cache = (
        make_batch([(20, 1), (20, 1), (20, 1)], 16, 8),
        make_pool(8, 1, 16, 16, torch.int8).layers[0],
    )
    q = torch.randn(3, 2, 16).to(dtype)
    scales = cache.key_scales if broken == "key_scales" else cache.value_scales
    assert scales is not None
    scales[int(batch.block_tables[0, 0]), 0, 5] = math.nan
    q[1, 1, 0] = math.inf
    found = own.paged_attention(q, cache, batch, 0.25, None)
    assert found.isnan().all(-1).tolist() == [[True, True], [False, True], [False, False]]
    assert found[2].isfinite().all()


def test_two_threads_give_the_bits_of_one(kernels: tuple[Kernels, torch.dtype]) -> None:
    own, dtype = kernels
    batch = make_batch([(0, 150), (40, 1), (90, 1)], 16, 120)
    q, k, v = (torch.randn(152, heads, 64).to(dtype) for heads in (9, 3, 3))
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        pool = make_pool(120, 3, 16, 64, torch.int8)
        own.rotary_and_write(q.clone(), k, v, None, None, batch, pool.layers[1])
        found.append((own.paged_attention(q, pool.layers[1], batch, 0.125, None), pool.memory))
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


def test_scales_that_lie_elsewhere_are_refused(kernels: tuple[Kernels, torch.dtype]) -> None:
    own, dtype = kernels
    batch, cache = make_batch([(0, 2)], 16, 8), make_pool(8, 1, 16, 16, torch.int8).layers[0]
    assert cache.key_scales is not None
    moved = LayerCache(
        keys=cache.keys,
        values=cache.values,
        key_scales=cache.key_scales.clone(),
        value_scales=cache.value_scales,
    )
    q = torch.randn(2, 2, 16).to(dtype)
    with pytest.raises(AssertionError, match="without its scales"):
        own.paged_attention(q, moved, batch, 1.0, None)
