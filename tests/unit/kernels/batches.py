"""Step batches and pools for the kernel tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from workers.kernels import StepBatch, StepMessage, build_batch, pack_step, unpack


def make_message(
    sequences: Sequence[tuple[int, int]],
    block_size: int,
    num_blocks: int,
    *,
    seed: int = 0,
    logit_rows: Sequence[int] = (),
    vocab_size: int = 1,
) -> StepMessage:
    """A step of (tokens in the pool, tokens of this step) sequences; blocks scattered over the pool."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(num_blocks, generator=generator).tolist()
    counts = [-(-(start + length) // block_size) for start, length in sequences]
    lens = [length for _, length in sequences]
    return pack_step(
        lens=lens,
        starts=[start for start, _ in sequences],
        block_counts=counts,
        token_ids=torch.randint(vocab_size, (sum(lens),), generator=generator).tolist(),
        blocks=order[: sum(counts)],
        logit_rows=logit_rows,
        zero_blocks=(),
    )


def batch_of(message: StepMessage, block_size: int, num_blocks: int, vocab_size: int = 1) -> StepBatch:
    """For the single operators."""
    return build_batch(
        unpack(message),
        block_size=block_size,
        num_blocks=num_blocks,
        vocab_size=vocab_size,
        device=torch.device("cpu"),
    )


def make_batch(
    sequences: Sequence[tuple[int, int]],
    block_size: int,
    num_blocks: int,
    seed: int = 0,
    logit_rows: Sequence[int] = (),
) -> StepBatch:
    """The batch of `make_message`."""
    message = make_message(sequences, block_size, num_blocks, seed=seed, logit_rows=logit_rows)
    return batch_of(message, block_size, num_blocks)


def make_pool(
    num_blocks: int, kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype
) -> torch.Tensor:
    """A pool of three layers full of noise: (num_blocks, kv_heads, 3, 2, block_size, head_dim)."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(num_blocks, kv_heads, 3, 2, block_size, head_dim, generator=generator).to(dtype)
