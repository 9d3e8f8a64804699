"""Attention over the paged pool, for decode and for prompts, in one form of arithmetic.

The context of a row is cut into splits of SPLIT positions, counted from position 0. Inside a split the
softmax runs over tiles in order (Milakov and Gimelshein 2018; Dao et al. 2022); the splits are folded
together in order too. So a row's bits do not depend on where its split results are kept:

- a program takes all splits of some rows and folds them in registers: for prompts;
- a program takes one split, and another kernel folds, through memory (Flash-Decoding, Dao et al. 2023): for
  decode, where a batch has too few rows to fill a GPU.

A program holds `rows` rows of scores: the query heads that share a KV head, of as many tokens as fit. What a
row may not see gets a weight of exactly 0: tiles and splits that its neighbours need change nothing for it.
Codes of an int8 pool go into the products as they are: their scales multiply scores and weights.

In a step with trees of guesses (`StepBatch.parents`) a program has one token, whose keys it takes in the
order of their positions, wherever they lie: a guess gets the bits that it would get in a sequence. Rows of
prompts in such a step are slow: each reads its whole context.

The torch form is `TorchKernels.paged_attention`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from workers.kernels.batch import StepBatch
from workers.kernels.gpu.attention_kernels import attend, fold_splits
from workers.kernels.gpu.rotary import dense_heads
from workers.kernels.gpu.tiles import warps_of, width_of

SPLIT = 256  # positions of a split; part of the arithmetic
_ROWS = 64  # the least that the matrix units of Hopper take
_MAX_PARTS_BYTES = 64 << 20  # of split results; more than that and splits stay in registers


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """How the work of a step is cut. The first three follow from the model, the rest from the batch."""

    rows: int
    tokens: int  # of a program
    tile: int  # keys
    query_tiles: int  # at most
    splits: int  # of the longest context
    has_parts: bool  # whether split results go through memory


def shape_of(
    q: torch.Tensor, kv_heads: int, sequences: int, max_context_len: int, *, has_trees: bool = False
) -> AttentionShape:
    """For queries (T, heads, d) of so many sequences. Looks at no data."""
    num_tokens, heads, dim = q.shape
    group = heads // kv_heads
    rows = max(_ROWS, width_of(group))
    fitting = rows // group
    tokens = 1 if has_trees else fitting
    tile = 64 if width_of(dim) * q.element_size() <= 256 else 32
    splits = max(1, triton.cdiv(max_context_len, SPLIT))
    parts_bytes = num_tokens * heads * splits * (dim + 2) * 4
    return AttentionShape(
        rows=rows,
        tokens=tokens,
        tile=tile,
        query_tiles=num_tokens // tokens + sequences,
        splits=splits,
        has_parts=splits > 1 and num_tokens <= fitting * sequences and parts_bytes <= _MAX_PARTS_BYTES,
    )


def paged_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor] | None,
    batch: StepBatch,
    *,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
) -> torch.Tensor:
    """As `Kernels.paged_attention`; scales are those of a pool of codes, as in `rotary_and_write`."""
    q = dense_heads(q)
    num_tokens, heads, dim = q.shape
    kv_heads = keys.shape[1]
    out = torch.empty((num_tokens, heads, dim), dtype=q.dtype, device=q.device)
    if num_tokens == 0:
        return out
    sequences = batch.context_lens.shape[0]
    has_trees = batch.parents is not None
    shape = shape_of(q, kv_heads, sequences, batch.max_context_len, has_trees=has_trees)
    key_scales, value_scales = (None, None) if scales is None else scales
    scale_strides = (0, 0) if key_scales is None else (key_scales.stride(0), key_scales.stride(1))
    inputs = (
        *(q, keys, values, key_scales, value_scales),
        *(batch.query_starts, batch.positions, batch.parents, batch.block_tables),
        *(q.stride(0), q.stride(1), keys.stride(0), keys.stride(1), *scale_strides),
        *(batch.block_tables.stride(0), sequences, scale, sliding_window or 0, soft_cap or 0.0),
    )
    group, width = heads // kv_heads, width_of(dim)
    has_window, has_cap = sliding_window is not None, soft_cap is not None
    constants = (
        *(group, dim, width, keys.shape[2], shape.rows, shape.tokens, shape.tile, SPLIT, has_window, has_cap),
    )
    num_warps = (
        4 if width * q.element_size() <= 256 else 8
    )  # as many as the registers of a row of values take
    num_stages = 2 if q.element_size() == 2 else 1  # float32 has no shared memory for a second one
    if not shape.has_parts:
        attend[(shape.query_tiles, kv_heads)](
            *(*inputs, out, None, None, None, *constants), num_warps=num_warps, num_stages=num_stages
        )
        return out
    bests = torch.empty((num_tokens, heads, shape.splits), dtype=torch.float32, device=q.device)
    masses = torch.empty_like(bests)
    parts = torch.empty((num_tokens, heads, shape.splits, dim), dtype=torch.float32, device=q.device)
    attend[(shape.query_tiles, kv_heads, shape.splits)](
        *(*inputs, None, bests, masses, parts, *constants), num_warps=num_warps, num_stages=num_stages
    )
    fold_splits[(num_tokens, kv_heads)](
        *(bests, masses, parts, batch.positions, out, shape.splits, sliding_window or 0),
        *(group, width_of(group), dim, width, SPLIT, has_window),
        num_warps=warps_of(width_of(group) * width),
    )
    return out
