"""Kernels that add in an order which depends on something: comparisons must notice each of them."""

from __future__ import annotations

import torch

from workers.kernels import (
    FusedStep,
    Kernels,
    LayerCache,
    PackedLinear,
    PartLinear,
    Quantization,
    QuantizedWeight,
    StepBatch,
    StepModel,
    SumOrder,
    TorchKernels,
    load_library,
)
from workers.kernels.native import CpuKernels
from workers.kernels.quantized import quantize


class _WholePart:
    """A rank's sum, rounded as it would be sent, as one node; its others are zero."""

    def __init__(self, linear: PackedLinear, num_nodes: int) -> None:
        self._linear, self._num_nodes = linear, num_nodes

    def nodes(self, x: torch.Tensor) -> torch.Tensor:
        total = self._linear(x).float()
        return torch.stack([total, *[torch.zeros_like(total)] * (self._num_nodes - 1)])


class _SingleOperators(CpuKernels):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(load_library(), dtype)

    def fuse(self, model: StepModel) -> FusedStep | None:
        return None


class RankByRank(_SingleOperators):
    """Each rank adds up all of its inputs, then the ranks are added: what an all-reduce does."""

    def pack_linear(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        quantization: Quantization = Quantization.NONE,
        order: SumOrder | None = None,
    ) -> PackedLinear:
        return super().pack_linear(weight, bias, out_dtype, quantization)

    def pack_quantized(
        self,
        weight: QuantizedWeight,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        out_dtype: torch.dtype | None = None,
        order: SumOrder | None = None,
    ) -> PackedLinear:
        return super().pack_quantized(weight, bias, dtype, out_dtype)

    def pack_part(
        self, weight: torch.Tensor | QuantizedWeight, dtype: torch.dtype, order: SumOrder
    ) -> PartLinear:
        is_coded = isinstance(weight, QuantizedWeight)
        linear = self.pack_quantized(weight, None, dtype) if is_coded else self.pack_linear(weight)
        return _WholePart(linear, order.num_nodes)


class OwnScales(_SingleOperators):
    """A rank's part of a matrix has scales of its own."""

    def pack_part(
        self, weight: torch.Tensor | QuantizedWeight, dtype: torch.dtype, order: SumOrder
    ) -> PartLinear:
        assert isinstance(weight, QuantizedWeight), "a control of quantized weights"
        return super().pack_part(quantize(weight.values(), weight.quantization), dtype, order)


class TorchProducts(_SingleOperators):
    """torch's products: another kernel for one row than for many."""

    def pack_linear(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        quantization: Quantization = Quantization.NONE,
        order: SumOrder | None = None,
    ) -> PackedLinear:
        return TorchKernels().pack_linear(weight, bias, out_dtype, quantization, order)

    def pack_quantized(
        self,
        weight: QuantizedWeight,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        out_dtype: torch.dtype | None = None,
        order: SumOrder | None = None,
    ) -> PackedLinear:
        return TorchKernels().pack_quantized(weight, bias, dtype, out_dtype, order)

    def pack_part(
        self, weight: torch.Tensor | QuantizedWeight, dtype: torch.dtype, order: SumOrder
    ) -> PartLinear:
        return TorchKernels().pack_part(weight, dtype, order)


class AttentionByPage(_SingleOperators):
    """Softmax over a page at a time, joined page by page: its order is the page size's."""

    def paged_attention(
        self,
        q: torch.Tensor,
        cache: LayerCache,
        batch: StepBatch,
        scale: float,
        sliding_window: int | None,
        soft_cap: float | None = None,
    ) -> torch.Tensor:
        assert sliding_window is None and soft_cap is None and batch.parents is None
        out = torch.empty_like(q)
        group, size = q.shape[1] // cache.keys.shape[1], cache.block_size
        for sequence, table in enumerate(batch.block_tables.long()):
            first, end = batch.query_starts[sequence : sequence + 2].tolist()
            for row in range(first, end):
                seen = int(batch.positions[row]) + 1
                total, weight = torch.zeros(q.shape[1:]), torch.zeros(q.shape[1], 1)
                for page in range(-(-seen // size)):
                    held = min(size, seen - page * size)
                    keys = cache.keys[table[page], :, :held].float().repeat_interleave(group, 0)
                    values = cache.values[table[page], :, :held].float().repeat_interleave(group, 0)
                    weights = ((keys @ q[row].float()[..., None])[..., 0] * scale).exp()
                    total += (weights[:, None] @ values)[:, 0]
                    weight += weights.sum(-1, keepdim=True)
                out[row] = (total / weight).to(q.dtype)
        return out


def rank_by_rank(dtype: torch.dtype) -> Kernels:
    return RankByRank(dtype)


def own_scales(dtype: torch.dtype) -> Kernels:
    return OwnScales(dtype)


def torch_products(dtype: torch.dtype) -> Kernels:
    return TorchProducts(dtype)


def attention_by_page(dtype: torch.dtype) -> Kernels:
    return AttentionByPage(dtype)
