"""Paged attention: decode through split results, prompts in registers, the same bits from either."""

from __future__ import annotations

import pytest
import torch

from tests.unit.kernels.batches import batch_of
from tests.unit.kernels.gpu.support import (
    DTYPES,
    REFERENCE,
    alone,
    assert_close,
    batch_on_device,
    noise,
    on_device,
    pool_on_device,
)
from workers.kernels import StepBatch, pack_step
from workers.kernels.gpu.attention import shape_of
from workers.kernels.gpu.kernels import GpuKernels

DECODE = [(5, 1), (200, 1), (63, 1), (300, 1)]
MIXED = [(0, 40), (129, 1), (30, 17), (0, 1)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("mix", [[(0, 1)], DECODE, MIXED], ids=["first token", "decode", "mixed"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block_size"),
    [(9, 3, 64, 16), (4, 4, 80, 32), (8, 1, 128, 8)],
)
def test_paged_attention(
    dtype: torch.dtype,
    window: int | None,
    mix: list[tuple[int, int]],
    heads: int,
    kv_heads: int,
    dim: int,
    block_size: int,
) -> None:
    batch = batch_on_device(mix, block_size, 120)
    pool = pool_on_device(120, kv_heads, block_size, dim, dtype)
    q = noise(batch.positions.shape[0], heads + 1, dim, dtype=dtype)[:, :heads]
    cache = pool.layers[1]
    found = GpuKernels(dtype).paged_attention(q, cache, batch, dim**-0.5, window)
    assert_close(found, REFERENCE.paged_attention(q, cache, batch, dim**-0.5, window))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("dim", "block_size"), [(96, 16), (256, 16), (40, 5), (7, 3)])
def test_other_head_sizes(dtype: torch.dtype, dim: int, block_size: int) -> None:
    batch = batch_on_device([(290, 1), (70, 9)], block_size, 140)
    pool = pool_on_device(140, 2, block_size, dim, dtype)
    q, cache = noise(10, 6, dim, dtype=dtype), pool.layers[0]
    found = GpuKernels(dtype).paged_attention(q, cache, batch, dim**-0.5, None)
    assert_close(found, REFERENCE.paged_attention(q, cache, batch, dim**-0.5, None))


def test_a_window_of_one_position_gives_its_value() -> None:
    batch, pool = batch_on_device([(0, 5), (70, 2)], 8, 20), pool_on_device(20, 2, 8, 32, torch.bfloat16)
    q, cache = noise(7, 6, 32, dtype=torch.bfloat16), pool.layers[0]
    found = GpuKernels(torch.bfloat16).paged_attention(q, cache, batch, 0.2, 1)
    values = cache.values[batch.slots // 8, :, batch.slots % 8]  # (7, kv_heads, d)
    assert torch.equal(found, values.repeat_interleave(3, dim=1))


def test_no_rows() -> None:
    batch, pool = batch_on_device([], 8, 2), pool_on_device(2, 1, 8, 16, torch.float32)
    q = noise(0, 4, 16)
    assert GpuKernels(torch.float32).paged_attention(q, pool.layers[0], batch, 1.0, None).shape == (0, 4, 16)


def test_more_heads_than_a_tile_of_rows() -> None:
    batch, pool = batch_on_device([(0, 3), (20, 1)], 16, 8), pool_on_device(8, 1, 16, 16, torch.float32)
    q, cache = noise(4, 71, 16), pool.layers[0]
    found = GpuKernels(torch.float32).paged_attention(q, cache, batch, 0.25, None)
    assert_close(found, REFERENCE.paged_attention(q, cache, batch, 0.25, None))


@pytest.mark.parametrize("window", [None, 700])
def test_a_long_context(window: int | None) -> None:
    batch = batch_on_device([(2300, 1), (2100, 3), (10, 1)], 32, 150)
    pool = pool_on_device(150, 1, 32, 64, torch.bfloat16)
    q, cache = noise(5, 3, 64, dtype=torch.bfloat16), pool.layers[2]
    assert shape_of(q, 1, 3, batch.max_context_len).has_parts
    found = GpuKernels(torch.bfloat16).paged_attention(q, cache, batch, 0.125, window)
    assert_close(found, REFERENCE.paged_attention(q, cache, batch, 0.125, window))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 100])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(dtype: torch.dtype, window: int | None) -> None:
    """The mixed batch goes through registers, a row alone through memory, its context in three splits."""
    batch = batch_on_device([(600, 1), (513, 4), (0, 110), (255, 2), (3, 1)], 16, 120)
    pool = pool_on_device(120, 1, 16, 32, dtype)
    q, cache = noise(118, 3, 32, dtype=dtype), pool.layers[0]
    own = GpuKernels(dtype)
    assert not shape_of(q, 1, 5, batch.max_context_len).has_parts
    together = own.paged_attention(q, cache, batch, 0.125, window)
    for sequence in range(5):
        single, rows = alone(batch, sequence)
        assert torch.equal(own.paged_attention(q[rows], cache, single, 0.125, window), together[rows])


def test_what_is_past_the_context_does_not_count() -> None:
    batch = batch_on_device([(20, 1), (3, 2)], 16, 4)
    pool = pool_on_device(4, 1, 16, 64, torch.bfloat16)
    q, cache = noise(3, 2, 64, dtype=torch.bfloat16), pool.layers[0]
    wanted = GpuKernels(torch.bfloat16).paged_attention(q, cache, batch, 0.125, None)
    for sequence, last in ((0, 21), (1, 5)):
        pool.numbers[batch.block_tables[sequence, last // 16].long(), :, :, :, last % 16 :] = torch.nan
    assert torch.equal(GpuKernels(torch.bfloat16).paged_attention(q, cache, batch, 0.125, None), wanted)
    assert bool(wanted.isfinite().all())


def tree_batch() -> StepBatch:
    """A tree of guesses behind 250 tokens, so across a split, one behind 4, and a chain."""
    parents = (-1, 0, 0, 1, 3, 2, 4, 4, *(-1, 0, 0, 2), *(-1, 0, 1))
    message = pack_step(
        lens=[8, 4, 3], starts=[250, 4, 0], block_counts=[33, 1, 1], token_ids=[0] * 15,
        blocks=[*range(40, 5, -1)], logit_rows=(), parents=parents,
    )  # fmt: skip
    return on_device(batch_of(message, 8, 48))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 5])
def test_trees_of_guesses(dtype: torch.dtype, window: int | None) -> None:
    batch, cache = tree_batch(), pool_on_device(48, 2, 8, 32, dtype).layers[1]
    q = noise(15, 6, 32, dtype=dtype)
    found = GpuKernels(dtype).paged_attention(q, cache, batch, 0.2, window)
    assert_close(found, REFERENCE.paged_attention(q, cache, batch, 0.2, window))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_guess_has_the_bits_of_plain_decoding(dtype: torch.dtype) -> None:
    """The path 0, 1, 3, 4, 7 of the first tree as a sequence of its own."""
    tree, own = tree_batch(), GpuKernels(dtype)
    pool = pool_on_device(48, 2, 8, 32, dtype)
    q, path = noise(15, 6, 32, dtype=dtype), [0, 1, 3, 4, 7]
    found = own.paged_attention(q, pool.layers[0], tree, 0.2, None)
    rows = pool.layers[0].keys[tree.slots[path] // 8, :, tree.slots[path] % 8].clone()
    values = pool.layers[0].values[tree.slots[path] // 8, :, tree.slots[path] % 8].clone()
    at = tree.slots[:5]
    pool.layers[0].keys[at // 8, :, at % 8], pool.layers[0].values[at // 8, :, at % 8] = rows, values
    plain = on_device(
        batch_of(
            pack_step(
                lens=[1], starts=[254], block_counts=[33], token_ids=[0], blocks=[*range(40, 7, -1)],
                logit_rows=(),
            ),
            8,
            48,
        )
    )  # fmt: skip
    assert torch.equal(own.paged_attention(q[7:8], pool.layers[0], plain, 0.2, None), found[7:8])


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_int8_pages(dtype: torch.dtype, window: int | None) -> None:
    batch, cache = (
        batch_on_device([(290, 1), (70, 9)], 16, 40),
        pool_on_device(40, 2, 16, 64, torch.int8).layers[1],
    )
    q = noise(10, 6, 64, dtype=dtype)
    found = GpuKernels(dtype).paged_attention(q, cache, batch, 0.125, window)
    assert_close(found, REFERENCE.paged_attention(q, cache, batch, 0.125, window))
