"""The MLP of a layer: what a rank computes of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from workers.kernels import Kernels, PackedLinear
from workers.model.architecture import Activation
from workers.model.parallel import Part, RowParallel


class Mlp(Protocol):
    """Any MLP. The parts of the ranks add up to its result; the caller has that done."""

    def __call__(self, x: torch.Tensor) -> Part:
        """x (T, hidden), equal on all ranks -> this rank's part of (T, hidden)."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseMlp:
    """Every row goes through the same two or three matrices; a rank has some of the inner columns."""

    kernels: Kernels
    activation: Activation
    is_gated: bool  # activation(gate) * up, else activation(up)
    up: PackedLinear  # hidden -> [gate | up] of this rank, or up alone
    down: RowParallel  # inner columns of this rank -> hidden

    def __call__(self, x: torch.Tensor) -> Part:
        return self.down(self._activate(self.up(x)))

    def _activate(self, up: torch.Tensor) -> torch.Tensor:
        if self.is_gated:
            if self.activation is Activation.SILU:
                return self.kernels.silu_mul(up)
            gate, up = up.chunk(2, dim=-1)
            return self._nonlinear(gate) * up
        return self._nonlinear(up)

    def _nonlinear(self, x: torch.Tensor) -> torch.Tensor:
        match self.activation:
            case Activation.SILU:
                return self.kernels.silu(x)
            case Activation.GELU:
                return self.kernels.gelu(x)
            case Activation.GELU_TANH:
                return self.kernels.gelu_new(x)
            case Activation.RELU:
                return F.relu(x)
