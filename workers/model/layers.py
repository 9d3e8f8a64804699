"""What a rank holds of a model: its norms, projections and tables, ready for the kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from workers.kernels import Kernels, PackedLinear
from workers.model.parallel import RowParallelLinear, VocabParallelEmbedding, VocabParallelHead
from workers.model.rotary import Rotary


class Norm:
    """RMS norm, or layer norm when it has a bias, with the addition to the residual stream before it."""

    def __init__(self, kernels: Kernels, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> None:
        self._kernels = kernels
        self._weight = weight  # (hidden,)
        self._bias = bias
        self._eps = eps

    @property
    def weight(self) -> torch.Tensor:
        return self._weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x (T, hidden)."""
        if self._bias is None:
            return self._kernels.rms_norm(x, self._weight, self._eps)
        return self._kernels.layer_norm(x, self._weight, self._bias, self._eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of x + residual, x + residual); may overwrite `residual`."""
        if self._bias is None:
            return self._kernels.add_rms_norm(x, residual, self._weight, self._eps)
        total = x + residual
        return self._kernels.layer_norm(total, self._weight, self._bias, self._eps), total


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Weights of one layer on this rank."""

    attention_norm: Norm
    qkv: PackedLinear  # hidden -> [q heads | kv heads | kv heads] * head_dim of this rank
    query_norm: torch.Tensor | None  # (head_dim,)
    key_norm: torch.Tensor | None
    output: RowParallelLinear
    mlp_norm: Norm
    up: PackedLinear  # hidden -> [gate | up] of this rank, or up alone
    down: RowParallelLinear
    scale: float  # of attention scores
    sliding_window: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWeights:
    """All that a rank holds of a model."""

    embedding: VocabParallelEmbedding
    positions: torch.Tensor | None  # (max_model_len, hidden), whole on every rank
    rotary: Rotary | None
    layers: tuple[Layer, ...]
    final_norm: Norm
    head: VocabParallelHead
    head_ids: tuple[int, ...] | None = None  # the token of each row of the head; None: all, in order
