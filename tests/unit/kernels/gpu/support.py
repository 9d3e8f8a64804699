"""Shared by the tests of the Triton kernels."""

from __future__ import annotations

import dataclasses

import torch

from tests.unit.kernels.batches import make_batch, make_pool
from workers.kernels import PagedCache, StepBatch, TorchKernels
from workers.kernels.gpu.interpreter import DEVICE

REFERENCE = TorchKernels()
DTYPES = [torch.float32, torch.bfloat16]


def batch_on_device(sequences: list[tuple[int, int]], block_size: int, num_blocks: int) -> StepBatch:
    """The batch of (tokens in the pool, tokens of this step) sequences."""
    return on_device(make_batch(sequences, block_size, num_blocks))


def on_device(batch: StepBatch) -> StepBatch:
    tensors = {
        field.name: value.to(DEVICE)
        for field in dataclasses.fields(batch)
        if isinstance(value := getattr(batch, field.name), torch.Tensor)
    }
    return dataclasses.replace(batch, **tensors)


def pool_on_device(
    num_blocks: int, kv_heads: int, block_size: int, dim: int, dtype: torch.dtype
) -> PagedCache:
    """Three layers of noise; dtype: of its numbers, or int8."""
    return make_pool(num_blocks, kv_heads, block_size, dim, dtype).clone(DEVICE)


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def assert_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Within two units in the last place of bfloat16, or 2e-5 in float32."""
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    tolerance = 2e-5 if found.dtype == torch.float32 else 1.6e-2
    torch.testing.assert_close(found.float(), wanted.float(), rtol=tolerance, atol=tolerance)


def alone(batch: StepBatch, sequence: int) -> tuple[StepBatch, slice]:
    """One sequence of a batch as a batch of its own, over the same pool, and its rows."""
    first, end = batch.query_starts[sequence : sequence + 2].tolist()
    rows = slice(first, end)
    context = int(batch.context_lens[sequence])
    return (
        dataclasses.replace(
            batch,
            token_ids=batch.token_ids[rows],
            positions=batch.positions[rows],
            slots=batch.slots[rows],
            query_starts=torch.tensor([0, end - first], dtype=torch.int32, device=DEVICE),
            context_lens=batch.context_lens[sequence : sequence + 1],
            block_tables=batch.block_tables[sequence : sequence + 1].contiguous(),
            max_context_len=context,
            host=None,
        ),
        rows,
    )
