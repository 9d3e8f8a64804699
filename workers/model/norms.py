"""The norms of a decoder, each with the addition to the residual stream before it."""

from __future__ import annotations

from typing import Protocol

import torch

from workers.kernels import Kernels
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
    """All query heads of the model as one vector, and all key heads; a rank has some of them."""

    def __init__(
        self,
        parallel: TensorParallel,
        query_weight: torch.Tensor,
        key_weight: torch.Tensor,
        *,
        query_size: int,
        key_size: int,
        eps: float,
    ) -> None:
        """Weights are of this rank's heads. Sizes: elements that all ranks have together, where a KV head
        that several ranks hold counts for each of them."""
        self._parallel = parallel
        self._query_weight = query_weight.float()
        self._key_weight = key_weight.float()
        self._sizes = torch.tensor([query_size, key_size], dtype=torch.float32, device=query_weight.device)
        self._eps = eps

    def __call__(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        queries, keys = q.flatten(1).float(), k.flatten(1).float()
        squares = torch.stack((queries.square().sum(-1), keys.square().sum(-1)), dim=-1)  # (T, 2)
        # All-reduce: the mean is over the heads of all ranks.
        scales = torch.rsqrt(self._parallel.all_reduce(squares) / self._sizes + self._eps)
        queries = queries * scales[:, :1] * self._query_weight
        keys = keys * scales[:, 1:] * self._key_weight
        return queries.to(q.dtype).view(q.shape), keys.to(k.dtype).view(k.shape)
