"""The form of the pool, and rows of keys and values as int8."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.unit.kernels.batches import make_pool
from workers.kernels import CacheForm, PagedCache
from workers.kernels.paged_cache import dequantize_rows, quantize_rows


def test_scales_are_rounded_up_and_codes_half_to_even() -> None:
    # 128 / 127 = 1.00787.. lies between the halves 1.0078125, which is nearer, and 1.0087890625.
    codes, scales = quantize_rows(torch.tensor([[127.0, -0.5, 1.5, 2.5], [128.0, -128.0, 0.0, 64.0]]))
    assert scales.tolist() == [1.0, 1.0087890625]
    assert codes.tolist() == [[127, 0, 2, 2], [127, -127, 0, 63]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1e-9, 1e-6, 1.0, 8e6])
def test_values_come_back_within_half_a_step(dtype: torch.dtype, size: float) -> None:
    x = (torch.randn(200, 64, generator=torch.Generator().manual_seed(0)) * size).clamp(-8e6, 8e6).to(dtype)
    codes, scales = quantize_rows(x)
    steps = scales.float()
    assert bool((steps * 127 >= x.float().abs().amax(-1)).all())
    assert bool((steps <= (x.float().abs().amax(-1) / 127 * (1 + 2**-10)).clamp(min=2**-24)).all())
    error = (dequantize_rows(codes, scales) - x.float()).abs()
    assert bool((error <= steps[:, None] * 0.50001).all())


def test_zeros_stay_zeros() -> None:
    codes, scales = quantize_rows(torch.zeros(2, 3, 8))
    assert codes.shape == (2, 3, 8) and scales.shape == (2, 3)
    assert not codes.any() and not scales.any()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 8.4e6])
def test_what_no_scale_holds_is_seen(bad: float) -> None:
    x = torch.ones(2, 8)
    x[0, 3] = bad
    codes, scales = quantize_rows(x)
    assert scales.isnan().tolist() == [True, False] and not codes[0].any()
    assert dequantize_rows(codes, scales).isnan().all(-1).tolist() == [True, False]


@pytest.mark.parametrize("move", [PagedCache.move_rows, PagedCache._move_at_once])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_rows_move_with_their_scales(
    dtype: torch.dtype, move: Callable[[PagedCache, Sequence[int], Sequence[int]], None]
) -> None:
    pool = make_pool(6, 2, 4, 8, dtype)
    before = pool.clone()
    sources, targets = (5, 6, 23), (4, 5, 0)  # one is both
    move(pool, sources, targets)
    for source, target in zip(sources, targets, strict=True):
        for rows, old in ((pool.numbers, before.numbers), (pool.scales, before.scales)):
            if rows is not None and old is not None:
                moved = rows[target // 4, :, :, :, target % 4]
                assert torch.equal(moved, old[source // 4, :, :, :, source % 4])
    changed = (pool.memory != before.memory).any(1).nonzero().flatten().tolist()
    assert changed == [0, 1]


def test_on_a_device_more_rows_are_not_more_launches() -> None:
    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            found.append(str(func))
            return func(*args, **(kwargs or {}))

    pool = make_pool(6, 2, 4, 8, torch.int8).clone(torch.device("meta"))
    launches = []
    for count in (2, 8):
        found: list[str] = []
        with Operators():
            pool.move_rows(range(count), range(count, 2 * count))
        launches.append(found)
    assert launches[0] == launches[1] and found.count("aten.index_put_.default") == 2


def test_memory_of_another_size_is_refused() -> None:
    form = CacheForm(num_kv_heads=2, num_layers=3, block_size=4, head_dim=8, dtype=torch.int8)
    assert form.block_bytes == 2 * 3 * 2 * 4 * (8 + 2)
    with pytest.raises(ValueError, match=r"memory \(5, 481\) for blocks of 480 bytes"):
        PagedCache(torch.zeros(5, 481, dtype=torch.uint8), form)
