"""A model whose every sum is exact, in any order: what differs then is a fault of logic, not of rounding.

Weights and activations are multiples of 1/16, at most 8: products and sums of some hundreds of them fit the
24 bits of a float32. Norms divide by powers of two, attention weighs by powers of two. The numbers mean
nothing, but each depends on every token, block, position and head that it should depend on.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from workers.kernels import (
    Kernels,
    LayerCache,
    PackedLinear,
    PartLinear,
    Quantization,
    QuantizedWeight,
    StepBatch,
    SumOrder,
    TorchKernels,
)

_STEP, _MOST = 1 / 16, 8.0
_DEEPEST = -6.0  # a weight of attention is 2 ** this at least


def on_grid(x: torch.Tensor) -> torch.Tensor:
    return ((x / _STEP).round() * _STEP).clamp(-_MOST, _MOST)


def put_on_grid(folder: Path) -> Path:
    """Rounds a checkpoint's weights, matrices to at most 1."""
    file = folder / "model.safetensors"
    tensors = {name: on_grid(2 * x).clamp(-1, 1).contiguous() for name, x in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


class _GridLinear:
    def __init__(self, linear: PackedLinear) -> None:
        self._linear = linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return on_grid(self._linear(x))


class ExactKernels(TorchKernels):
    """torch's products, or those of other kernels, between operators that end on the grid. float32."""

    def __init__(self, products: Kernels) -> None:
        self._products = products

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        mean = x.square().sum(-1, keepdim=True) / x.shape[-1]
        scale = torch.exp2(-torch.frexp(mean).exponent.div(2, rounding_mode="floor").float())
        return on_grid(x * scale * weight)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = on_grid(on_grid(x) + residual)
        return self.rms_norm(total, weight, eps), total

    def rotary_and_write(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cos: torch.Tensor | None,
        sin: torch.Tensor | None,
        batch: StepBatch,
        cache: LayerCache,
    ) -> torch.Tensor:
        assert cos is not None and sin is not None
        cos, sin = on_grid(cos), on_grid(sin)
        turned = super().rotary_and_write(q, k, v, cos, sin, batch, cache)
        blocks, offsets = batch.slots // cache.block_size, batch.slots % cache.block_size
        cache.keys[blocks, :, offsets] = on_grid(cache.keys[blocks, :, offsets])
        return on_grid(turned)

    def paged_attention(
        self,
        q: torch.Tensor,
        cache: LayerCache,
        batch: StepBatch,
        scale: float,
        sliding_window: int | None,
        soft_cap: float | None = None,
    ) -> torch.Tensor:
        """Row by row. No windows, no trees."""
        assert sliding_window is None and soft_cap is None and batch.parents is None
        out = torch.empty_like(q)
        group = q.shape[1] // cache.keys.shape[1]
        for sequence, table in enumerate(batch.block_tables.long()):
            first, end = batch.query_starts[sequence : sequence + 2].tolist()
            for row in range(first, end):
                seen = int(batch.positions[row]) + 1
                keys = cache.keys[table].transpose(1, 2).flatten(0, 1)[:seen].repeat_interleave(group, 1)
                values = cache.values[table].transpose(1, 2).flatten(0, 1)[:seen].repeat_interleave(group, 1)
                scores = (keys * q[row]).sum(-1) * scale  # (seen, heads)
                powers = (scores - scores.amax(0)).floor().clamp(min=_DEEPEST)
                weights = torch.exp2(powers)
                total = (weights[..., None] * values).sum(0)
                out[row] = on_grid(total / weights.sum(0)[:, None])
        return out

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = on_grid(gate_up).chunk(2, dim=-1)
        return on_grid(gate.relu() * up)

    def pack_linear(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        quantization: Quantization = Quantization.NONE,
        order: SumOrder | None = None,
    ) -> PackedLinear:
        linear = self._products.pack_linear(weight, bias, out_dtype, quantization, order)
        return _GridLinear(linear) if out_dtype is None else linear  # logits stay as they are

    def pack_part(
        self, weight: torch.Tensor | QuantizedWeight, dtype: torch.dtype, order: SumOrder
    ) -> PartLinear:
        return self._products.pack_part(weight, dtype, order)
