"""What a rank holds of a model: its norms, projections and tables, ready for the kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from workers.kernels import PackedLinear
from workers.model.mlp import Mlp
from workers.model.norms import Norm, QueryKeyNorm
from workers.model.parallel import RowParallel, VocabParallelEmbedding, VocabParallelHead
from workers.model.rotary import Rotary


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Weights of one layer on this rank. The parts of all ranks of `output` and of `mlp` add up to the whole:
    whoever calls them has the sum made."""

    attention_norm: Norm
    qkv: PackedLinear  # hidden -> [q heads | kv heads | kv heads] * head_dim of this rank
    query_key_norm: QueryKeyNorm | None
    rotary: int | None  # of DecoderWeights.rotaries; None: nothing turns
    scale: float  # of attention scores
    sliding_window: int | None
    output: RowParallel  # q heads * head_dim of this rank -> hidden
    attention_post_norm: Norm | None
    mlp_norm: Norm | None  # None: the MLP reads what attention reads
    mlp: Mlp
    mlp_post_norm: Norm | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWeights:
    """All that a rank holds of a model."""

    embedding: VocabParallelEmbedding
    positions: torch.Tensor | None  # (max_model_len, hidden), whole on every rank
    rotaries: tuple[Rotary, ...]  # the different ones of the layers
    layers: tuple[Layer, ...]
    final_norm: Norm
    head: VocabParallelHead
    head_ids: tuple[int, ...] | None = None  # the token of each row of the head; None: all, in order
