"""What C++ takes on trust from a tensor's address: dtype, layout and number of rows.

Indices (blocks, slots, rows) are checked where the batch is made; here only what needs no look at the data.
"""

from __future__ import annotations

import torch

from workers.kernels.batch import StepBatch
from workers.kernels.paged_cache import LayerCache


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


def check_cache(cache: LayerCache, dtype: torch.dtype) -> None:
    """Keys and values lie alike, dense in their last two axes, with the scales of int8 right behind them."""
    keys, values = cache.keys, cache.values
    expected = torch.int8 if cache.is_quantized else dtype
    assert keys.dtype == values.dtype == expected, (keys.dtype, values.dtype, expected)
    assert keys.shape == values.shape and keys.stride() == values.stride(), (keys.shape, values.shape)
    assert keys.stride()[2:] == (keys.shape[3], 1), keys.stride()
    for rows, scales in ((keys, cache.key_scales), (values, cache.value_scales)):
        if scales is not None:
            assert scales.dtype == torch.float16 and scales.shape == rows.shape[:3], (
                scales.dtype,
                scales.shape,
            )
            assert scales.data_ptr() == rows.data_ptr() + rows.shape[2] * rows.shape[3], (
                "a page without its scales"
            )
            assert [2 * stride for stride in scales.stride()] == [*rows.stride()[:2], 2], scales.stride()
