"""The norms of a decoder, each with the addition to the residual stream before it."""

from __future__ import annotations

from typing import Protocol

import torch

from workers.kernels import Kernels
from workers.model.architecture import ModelSpec
from workers.model.parallel import TensorParallel


class Norm(Protocol):
    """Stands before attention, MLP or head."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x (T, hidden) -> (T, hidden)."""
        ...

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of x + residual, x + residual); may overwrite `residual`."""
        ...


class RmsNorm:
    """Root-mean-square norm (Zhang and Sennrich 2019)."""

    def __init__(self, kernels: Kernels, weight: torch.Tensor, eps: float) -> None:
        self._kernels = kernels
        self._weight = weight  # (hidden,)
        self._eps = eps

    @property
    def weight(self) -> torch.Tensor:
        return self._weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._kernels.rms_norm(x, self._weight, self._eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._kernels.add_rms_norm(x, residual, self._weight, self._eps)


class LayerNorm:
    """Layer norm (Ba et al. 2016)."""

    def __init__(self, kernels: Kernels, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> None:
        self._kernels = kernels
        self._weight = weight  # (hidden,), as bias
        self._bias = bias
        self._eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._kernels.layer_norm(x, self._weight, self._bias, self._eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + residual
        return self(total), total


class NoNorm:
    """In its place, where a family has none: what follows reads the residual stream itself."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + residual  # not in place: whoever got `residual` as its norm may still read it
        return total, total


class QueryKeyNorm(Protocol):
    """RMS norm of queries and keys before they turn."""

    def __call__(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """q (T, heads, head_dim), k (T, kv heads, head_dim), views of a QKV row; of this rank."""
        ...


class HeadNorms:
    """Every head by itself."""

    def __init__(
        self, kernels: Kernels, query_weight: torch.Tensor, key_weight: torch.Tensor, eps: float
    ) -> None:
        self._kernels = kernels
        self.query_weight = query_weight  # (head_dim,)
        self.key_weight = key_weight
        self._eps = eps

    def __call__(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rms_norm = self._kernels.rms_norm
        return rms_norm(q, self.query_weight, self._eps), rms_norm(k, self.key_weight, self._eps)


class WidthNorms:
    """All query heads of the model as one vector, and all key heads; a rank has some of them.

    Every head is added up by itself, on one rank, and the heads in one order on all of them: so the bits are
    those of any number of ranks.
    """

    def __init__(
        self,
        parallel: TensorParallel,
        spec: ModelSpec,
        query_weight: torch.Tensor,
        key_weight: torch.Tensor,
    ) -> None:
        """Weights are of this rank's heads."""
        rank, size = parallel.rank, parallel.size
        self._parallel = parallel
        self._query_weight = query_weight.float()
        self._key_weight = key_weight.float()
        self._eps = spec.norm_eps
        self._num_heads, self._num_kv_heads, self._head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self._queries, self._keys = spec.q_heads_of_rank(rank, size), spec.kv_heads_of_rank(rank, size)
        # Of ranks with copies of one KV head the first brings it.
        self._brings_keys = rank == 0 or spec.kv_heads_of_rank(rank - 1, size) != self._keys

    def __call__(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        queries, keys = q.flatten(1).float(), k.flatten(1).float()
        heads, kv_heads = self._num_heads, self._num_kv_heads
        squares = queries.new_zeros((q.shape[0], heads + kv_heads))
        squares[:, self._queries.start : self._queries.stop] = self._of_heads(queries)
        if self._brings_keys:
            squares[:, heads + self._keys.start : heads + self._keys.stop] = self._of_heads(keys)
        # All-reduce: the mean is over the heads of all ranks; where one has some, all others add zeros.
        squares = self._parallel.all_reduce(squares)
        queries = queries * self._scale(squares[:, :heads]) * self._query_weight
        keys = keys * self._scale(squares[:, heads:]) * self._key_weight
        return queries.to(q.dtype).view(q.shape), keys.to(k.dtype).view(k.shape)

    def _of_heads(self, x: torch.Tensor) -> torch.Tensor:
        """(T, heads * head_dim) -> sums of squares, (T, heads)."""
        return x.square().view(x.shape[0], -1, self._head_dim).sum(-1)

    def _scale(self, squares: torch.Tensor) -> torch.Tensor:
        """Of all heads, (T, heads) -> (T, 1)."""
        mean = squares.sum(-1, keepdim=True) / (squares.shape[1] * self._head_dim)
        return torch.rsqrt(mean + self._eps)
