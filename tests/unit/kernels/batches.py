"""Step batches and pools for the kernel tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from workers.kernels import CacheForm, PagedCache, StepBatch, StepMessage, build_batch, pack_step, unpack
from workers.kernels.paged_cache import quantize_rows


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
) -> PagedCache:
    """A pool of three layers full of noise, seeded; dtype: of the numbers in it, or int8."""
    form = CacheForm(
        num_kv_heads=kv_heads, num_layers=3, block_size=block_size, head_dim=head_dim, dtype=dtype
    )
    pool = PagedCache.zeros(num_blocks, form)
    fill(pool, torch.Generator().manual_seed(1))
    return pool


def fill(pool: PagedCache, generator: torch.Generator) -> None:
    """With normal numbers."""
    noise = torch.randn(pool.numbers.shape, generator=generator)
    if pool.scales is None:
        pool.numbers.copy_(noise)
    else:
        codes, scales = quantize_rows(noise)
        pool.numbers.copy_(codes)
        pool.scales.copy_(scales)
