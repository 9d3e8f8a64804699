"""The Triton kernels as `workers.kernels.interface.Kernels`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from workers.kernels.arguments import check_batch, check_cache, check_turn
from workers.kernels.batch import StepBatch
from workers.kernels.draw import Draw
from workers.kernels.gpu.activation import gelu_tanh, silu_mul
from workers.kernels.gpu.attention import paged_attention
from workers.kernels.gpu.draw import draw, start_draw
from workers.kernels.gpu.flash_attention import FlashAttention
from workers.kernels.gpu.linear import GpuLinear
from workers.kernels.gpu.linear_int4 import pack_int4
from workers.kernels.gpu.norms import add_rms_norm, layer_norm, rms_norm
from workers.kernels.gpu.rotary import rotary_and_write
from workers.kernels.interface import (
    FusedGuesses,
    FusedStep,
    GuessModel,
    PackedLinear,
    PartLinear,
    StepModel,
)
from workers.kernels.order import SumOrder
from workers.kernels.paged_cache import LayerCache
from workers.kernels.quantized import QuantizedWeight, quantize
from workers.kernels.reference import TorchKernels
from workers.weight_forms import Quantization


class GpuKernels:
    """Implements Kernels for one dtype, bfloat16 or float32, on one CUDA device."""

    def __init__(self, dtype: torch.dtype, flash: FlashAttention | None = None) -> None:
        """flash: for prompts."""
        self._dtype = dtype
        self._flash = flash
        self._torch = TorchKernels()

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return add_rms_norm(x, residual, weight, eps)

    def layer_norm(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
    ) -> torch.Tensor:
        return layer_norm(x, weight, bias, eps)

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
        check_cache(cache, self._dtype)
        check_batch(batch, q.shape[0])
        check_turn(cos, sin, q.shape[0], q.shape[2])
        keys, values = cache.keys, cache.values
        assert k.shape == v.shape == (q.shape[0], keys.shape[1], keys.shape[3]), (k.shape, keys.shape)
        turn = None if cos is None or sin is None else (cos, sin)
        return rotary_and_write(q, k, v, turn, batch.slots, keys, values, cache.scales)

    def paged_attention(
        self,
        q: torch.Tensor,
        cache: LayerCache,
        batch: StepBatch,
        scale: float,
        sliding_window: int | None,
        soft_cap: float | None = None,
    ) -> torch.Tensor:
        check_cache(cache, self._dtype)
        check_batch(batch, q.shape[0])
        keys = cache.keys
        assert q.shape[2] == keys.shape[3] and q.shape[1] % keys.shape[1] == 0, (q.shape, keys.shape)

        def own(q: torch.Tensor, batch: StepBatch) -> torch.Tensor:
            return paged_attention(
                *(q, keys, cache.values, cache.scales, batch),
                scale=scale,
                sliding_window=sliding_window,
                soft_cap=soft_cap,
            )

        if self._flash is None:
            return own(q, batch)
        return self._flash.attend(q, cache, batch, scale, sliding_window, soft_cap, own)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return silu_mul(gate_up)

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(x)

    def gelu(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x)

    def gelu_new(self, x: torch.Tensor) -> torch.Tensor:
        return gelu_tanh(x)

    def draw(self, logits: torch.Tensor, draws: Sequence[Draw], *, only_finite: bool = False) -> list[int]:
        return draw(logits, draws, only_finite=only_finite)

    def draw_ids(self, logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
        return start_draw(logits, draws)

    def pack_linear(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        quantization: Quantization = Quantization.NONE,
        order: SumOrder | None = None,
    ) -> PackedLinear:
        if quantization is not Quantization.NONE:
            return self.pack_quantized(quantize(weight, quantization), bias, weight.dtype, out_dtype, order)
        return GpuLinear(
            weight=weight.contiguous(), scales=None, bias=bias, out_dtype=out_dtype or weight.dtype
        )

    def pack_quantized(
        self,
        weight: QuantizedWeight,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        out_dtype: torch.dtype | None = None,
        order: SumOrder | None = None,
    ) -> PackedLinear:
        assert dtype == self._dtype, (dtype, self._dtype)
        out_dtype = out_dtype or dtype
        if weight.minima is not None:
            return pack_int4(weight, bias, out_dtype)
        codes, scales = weight.codes.contiguous(), weight.scales.contiguous()
        return GpuLinear(weight=codes, scales=scales, bias=bias, out_dtype=out_dtype)

    def pack_part(
        self, weight: torch.Tensor | QuantizedWeight, dtype: torch.dtype, order: SumOrder
    ) -> PartLinear:
        return self._torch.pack_part(weight, dtype, order)

    def fuse(self, model: StepModel) -> FusedStep | None:
        return None

    def fuse_guesses(self, model: GuessModel) -> FusedGuesses | None:
        return None
