"""Step batches and pools for the kernel tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from workers.kernels import StepBatch


def make_batch(
    sequences: Sequence[tuple[int, int]],
    block_size: int,
    num_blocks: int,
    seed: int = 0,
    logit_rows: Sequence[int] = (),
) -> StepBatch:
    """A batch of (tokens in the pool, tokens of this step) sequences; blocks scattered over the pool."""
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).tolist()
    widths = [-(-(start + length) // block_size) for start, length in sequences]
    tables = torch.zeros(len(sequences), max(widths, default=0), dtype=torch.int32)
    positions, slots, query_starts = [], [], [0]
    for s, (start, length) in enumerate(sequences):
        blocks, order = order[: widths[s]], order[widths[s] :]
        tables[s, : widths[s]] = torch.tensor(blocks, dtype=torch.int32)
        at = range(start, start + length)
        positions += at
        slots += [blocks[p // block_size] * block_size + p % block_size for p in at]
        query_starts.append(query_starts[-1] + length)
    context_lens = [start + length for start, length in sequences]
    return StepBatch(
        token_ids=torch.zeros(len(positions), dtype=torch.int64),
        positions=torch.tensor(positions, dtype=torch.int64),
        slots=torch.tensor(slots, dtype=torch.int64),
        query_starts=torch.tensor(query_starts, dtype=torch.int32),
        context_lens=torch.tensor(context_lens, dtype=torch.int32),
        block_tables=tables,
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64),
        max_context_len=max(context_lens, default=0),
    )


def make_pool(
    num_blocks: int, kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype
) -> torch.Tensor:
    """A pool of three layers full of noise: (num_blocks, kv_heads, 3, 2, block_size, head_dim)."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(num_blocks, kv_heads, 3, 2, block_size, head_dim, generator=generator).to(dtype)
