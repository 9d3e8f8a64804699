"""Rotary embedding and the write of keys and values into pages."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.unit.kernels.gpu.support import (
    DTYPES,
    REFERENCE,
    assert_close,
    batch_on_device,
    noise,
    pool_on_device,
)
from workers.kernels import LayerCache
from workers.kernels.gpu.interpreter import DEVICE
from workers.kernels.gpu.kernels import GpuKernels

MIXES = [[], [(0, 1)], [(5, 1), (0, 9), (40, 3), (3, 1)]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block_size", "rotary"),
    [(6, 2, 24, 8, 16), (6, 2, 24, 8, None), (9, 3, 64, 16, 64), (5, 5, 80, 32, 32), (8, 1, 256, 8, 256)],
)
def test_rotary_and_write(
    dtype: torch.dtype,
    mix: list[tuple[int, int]],
    heads: int,
    kv_heads: int,
    dim: int,
    block_size: int,
    rotary: int | None,
) -> None:
    batch = batch_on_device(mix, block_size, 20)
    tokens = batch.positions.shape[0]
    fused = noise(tokens, heads + 2 * kv_heads, dim, dtype=dtype)
    angles = None if rotary is None else noise(tokens, rotary // 2, seed=3) * 6
    cos, sin = (None, None) if angles is None else (angles.cos(), angles.sin())
    results = []
    for each in (GpuKernels(dtype), REFERENCE):
        pool = pool_on_device(20, kv_heads, block_size, dim, dtype)
        q, k, v = fused.clone().split([heads, kv_heads, kv_heads], dim=1)
        turned = each.rotary_and_write(q, k, v, cos, sin, batch, pool.layers[1])
        results.append((turned, pool.numbers))
    assert_close(results[0][0], results[1][0])
    assert_close(results[0][1], results[1][1])
    assert torch.equal(results[0][1][:, :, 1, 1], results[1][1][:, :, 1, 1])


def test_a_row_of_padding_writes_nothing() -> None:
    batch = batch_on_device([(0, 3)], 8, 2)
    batch = dataclasses.replace(batch, slots=torch.tensor([-1, int(batch.slots[1]), -1], device=DEVICE))
    pool = torch.zeros(2, 1, 1, 2, 8, 16, device=DEVICE)
    cache = LayerCache(keys=pool[:, :, 0, 0], values=pool[:, :, 0, 1])
    row = torch.ones(3, 1, 16, device=DEVICE)
    GpuKernels(torch.float32).rotary_and_write(row, row.clone(), row, None, None, batch, cache)
    assert int((pool.sum(-1) > 0).sum()) == 2
    assert torch.equal(
        pool.view(2, 2, 8, 16)[int(batch.slots[1]) // 8, :, 1], torch.ones(2, 16, device=DEVICE)
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_int8_rows_are_those_of_the_reference(dtype: torch.dtype) -> None:
    batch = batch_on_device([(0, 7), (9, 1)], 4, 8)
    q, k, v = (noise(8, heads, 24, dtype=dtype, seed=heads) for heads in (6, 2, 3))
    v = v[:, :2].contiguous()
    v[2, 0], v[3, 1, 5], v[4, 1, 0] = 0.0, torch.nan, 3e38
    pools = [pool_on_device(8, 2, 4, 24, torch.int8) for _ in range(2)]
    for each, pool in zip((GpuKernels(dtype), REFERENCE), pools, strict=True):
        each.rotary_and_write(q.clone(), k, v, None, None, batch, pool.layers[1])
    own, wanted = pools
    assert torch.equal(own.numbers, wanted.numbers)
    torch.testing.assert_close(own.scales, wanted.scales, rtol=0, atol=0, equal_nan=True)
