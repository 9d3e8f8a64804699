"""The tensors of one step, as every kernel takes them."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """Tokens of S sequences laid end to end (T in all) with their place in the paged KV pool.

    Sequence s owns rows query_starts[s] .. query_starts[s + 1] - 1. Row r holds the token at positions[r] and
    attends to positions 0 .. positions[r] of its sequence. All tensors on the model's device.
    """

    token_ids: torch.Tensor  # (T,) int64
    positions: torch.Tensor  # (T,) int64
    slots: torch.Tensor  # (T,) int64: block * block_size + offset, where the token's K and V go
    query_starts: torch.Tensor  # (S + 1,) int32
    context_lens: torch.Tensor  # (S,) int32: tokens of the sequence in the pool after this step
    block_tables: torch.Tensor  # (S, W) int32; entries past the context are 0
    logit_rows: torch.Tensor  # (R,) int64: rows whose logits are wanted
    max_context_len: int
