"""What C++ takes on trust from a tensor's address: dtype, layout and number of rows.

Indices (blocks, slots, rows) are checked where the batch is made; here only what needs no look at the data.
"""

from __future__ import annotations

import torch

from workers.kernels.batch import StepBatch


def check_batch(batch: StepBatch, tokens: int) -> None:
    """The batch has the dtypes that StepBatch states, dense, for `tokens` rows."""
    assert batch.slots.shape == (tokens,) and batch.slots.dtype == torch.int64, (batch.slots.shape, tokens)
    assert batch.logit_rows.dtype == torch.int64, batch.logit_rows.dtype
    sequences = batch.context_lens.shape[0]
    assert batch.query_starts.shape == (sequences + 1,), (batch.query_starts.shape, sequences)
    assert batch.block_tables.shape[0] == sequences, (batch.block_tables.shape, sequences)
    for tensor in (batch.query_starts, batch.context_lens, batch.block_tables):
        assert tensor.dtype == torch.int32 and tensor.is_contiguous(), (tensor.dtype, tensor.stride())
    if (parents := batch.parents) is not None:
        assert parents.shape == (tokens,) and parents.dtype == torch.int32, (parents.shape, parents.dtype)


def check_turn(cos: torch.Tensor | None, sin: torch.Tensor | None, tokens: int, head_dim: int) -> None:
    """cos and sin turn at most a whole head, one float32 row a token; or neither is given."""
    if cos is None or sin is None:
        assert cos is None and sin is None, "cos without sin"
        return
    assert cos.dtype == sin.dtype == torch.float32, (cos.dtype, sin.dtype)
    assert cos.shape == sin.shape and cos.shape[0] == tokens, (cos.shape, sin.shape, tokens)
    assert 2 * cos.shape[1] <= head_dim, (cos.shape, head_dim)


def check_caches(k_cache: torch.Tensor, v_cache: torch.Tensor, dtype: torch.dtype) -> None:
    """Both caches lie alike, dense in their last two axes."""
    assert k_cache.dtype == v_cache.dtype == dtype, (k_cache.dtype, v_cache.dtype, dtype)
    assert k_cache.shape == v_cache.shape and k_cache.stride() == v_cache.stride(), (
        k_cache.shape,
        v_cache.shape,
    )
    assert k_cache.stride()[2:] == (k_cache.shape[3], 1), k_cache.stride()
