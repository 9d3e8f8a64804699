"""The C++ kernels of workers/kernels/cpu as `workers.kernels.interface.Kernels`, for bfloat16 and float32."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import torch

from workers.kernels.arguments import check_batch, check_cache, check_turn
from workers.kernels.batch import StepBatch
from workers.kernels.draw import Draw, pack_draws
from workers.kernels.fused import NativeStep, can_fuse
from workers.kernels.guesses import NativeGuesses, can_fuse_guesses
from workers.kernels.interface import (
    FusedGuesses,
    FusedStep,
    GuessModel,
    PackedLinear,
    PartLinear,
    StepModel,
)
from workers.kernels.library import DTYPES, Library
from workers.kernels.memory import HugeMemory
from workers.kernels.order import SumOrder
from workers.kernels.packed import can_pack, dense_rows, pack
from workers.kernels.packed_quantized import can_pack_quantized, pack_quantized
from workers.kernels.paged_cache import LayerCache
from workers.kernels.quantized import QuantizedWeight, quantize
from workers.kernels.reference import TorchKernels
from workers.weight_forms import Quantization


class CpuKernels:
    """Implements Kernels for one dtype. Tensors must be on the CPU, activations of that dtype."""

    def __init__(self, library: Library, dtype: torch.dtype) -> None:
        if dtype not in DTYPES:
            raise ValueError(f"the C++ kernels know {sorted(map(str, DTYPES))}, not {dtype}")
        self._library = library
        self._memory = HugeMemory()
        self._dtype = dtype
        self._code = DTYPES[dtype]
        self._torch = TorchKernels()

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        assert x.dtype == weight.dtype == self._dtype, (x.dtype, weight.dtype, self._dtype)
        assert weight.shape == x.shape[-1:] and weight.is_contiguous(), (x.shape, weight.shape)
        out = torch.empty(x.shape, dtype=x.dtype)
        if x.numel() == 0:
            return out
        if x.dim() > 3 or x.stride(-1) != 1:
            x = x.contiguous()
        size = x.shape[-1]
        if x.dim() == 3:
            outer, inner, outer_stride, inner_stride = x.shape[0], x.shape[1], x.stride(0), x.stride(1)
        else:
            x = x.reshape(-1, size)
            outer, inner, outer_stride, inner_stride = x.shape[0], 1, x.stride(0), 0
        self._library.rms_norm(
            *(self._code, x.data_ptr(), outer, inner, outer_stride, inner_stride, size),
            *(weight.data_ptr(), eps, out.data_ptr(), torch.get_num_threads()),
        )
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert x.dtype == residual.dtype == weight.dtype == self._dtype, (
            x.dtype,
            residual.dtype,
            weight.dtype,
        )
        assert x.shape == residual.shape and weight.shape == x.shape[-1:], (
            x.shape,
            residual.shape,
            weight.shape,
        )
        assert weight.is_contiguous(), weight.stride()
        x, residual = x.contiguous(), residual.contiguous()
        out = torch.empty(x.shape, dtype=x.dtype)
        size = x.shape[-1]
        if x.numel():
            self._library.add_rms_norm(
                *(self._code, x.data_ptr(), residual.data_ptr(), x.numel() // size, size),
                *(weight.data_ptr(), eps, out.data_ptr(), torch.get_num_threads()),
            )
        return out, residual

    def layer_norm(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
    ) -> torch.Tensor:
        return self._torch.layer_norm(x, weight, bias, eps)

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
        assert q.dtype == k.dtype == v.dtype == self._dtype, (q.dtype, k.dtype, v.dtype, self._dtype)
        q, k, v = _heads(q), _heads(k), _heads(v)
        tokens, heads, dim = q.shape
        check_cache(cache, self._dtype)
        check_batch(batch, tokens)
        check_turn(cos, sin, tokens, dim)
        keys, values = cache.keys, cache.values
        assert k.shape == v.shape == (tokens, keys.shape[1], keys.shape[3]), (k.shape, keys.shape)
        if tokens == 0:
            return q
        half = 0
        if cos is not None and sin is not None:
            cos, sin, half = cos.contiguous(), sin.contiguous(), cos.shape[-1]
        self._library.rotary_and_write(
            *(self._code, q.data_ptr(), q.stride(0), k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0)),
            *(None if cos is None else cos.data_ptr(), None if sin is None else sin.data_ptr(), half),
            *(tokens, heads, k.shape[1], dim, batch.slots.data_ptr()),
            *(cache.is_quantized, keys.data_ptr(), values.data_ptr()),
            *(keys.stride(0), keys.stride(1), cache.block_size, torch.get_num_threads()),
        )
        return q

    def paged_attention(
        self,
        q: torch.Tensor,
        cache: LayerCache,
        batch: StepBatch,
        scale: float,
        sliding_window: int | None,
        soft_cap: float | None = None,
    ) -> torch.Tensor:
        assert q.dtype == self._dtype, (q.dtype, self._dtype)
        q = _heads(q)
        tokens, heads, dim = q.shape
        check_cache(cache, self._dtype)
        check_batch(batch, tokens)
        keys, values = cache.keys, cache.values
        assert dim == keys.shape[3] and heads % keys.shape[1] == 0, (q.shape, keys.shape)
        out = torch.empty((tokens, heads, dim), dtype=q.dtype)
        if tokens:
            self._library.attention(
                *(self._code, q.data_ptr(), q.stride(0), out.data_ptr()),
                *(cache.is_quantized, keys.data_ptr(), values.data_ptr()),
                *(keys.stride(0), keys.stride(1), cache.block_size),
                *(
                    batch.query_starts.data_ptr(),
                    batch.context_lens.data_ptr(),
                    batch.block_tables.data_ptr(),
                    None if batch.parents is None else batch.parents.data_ptr(),
                ),
                *(batch.context_lens.shape[0], batch.block_tables.shape[1], heads, keys.shape[1], dim),
                *(sliding_window or 0, scale, soft_cap or 0.0, torch.get_num_threads()),
            )
        return out

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        assert gate_up.dtype == self._dtype, (gate_up.dtype, self._dtype)
        size = gate_up.shape[-1] // 2
        out = torch.empty((*gate_up.shape[:-1], size), dtype=gate_up.dtype)
        rows = dense_rows(gate_up)
        if rows.shape[0]:
            self._library.silu_mul(
                *(self._code, rows.data_ptr(), rows.stride(0), out.data_ptr(), rows.shape[0], size),
                torch.get_num_threads(),
            )
        return out

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        return self._by_element(self._library.silu, x)

    def gelu(self, x: torch.Tensor) -> torch.Tensor:
        return self._by_element(self._library.gelu, x)

    def gelu_new(self, x: torch.Tensor) -> torch.Tensor:
        return self._by_element(self._library.gelu_new, x)

    def _by_element(self, function: Callable[..., object], x: torch.Tensor) -> torch.Tensor:
        assert x.dtype == self._dtype, (x.dtype, self._dtype)
        x = x.contiguous()
        out = torch.empty(x.shape, dtype=x.dtype)
        if x.numel():
            size = x.shape[-1]
            function(
                self._code, x.data_ptr(), out.data_ptr(), x.numel() // size, size, torch.get_num_threads()
            )
        return out

    def draw(self, logits: torch.Tensor, draws: Sequence[Draw], *, only_finite: bool = False) -> list[int]:
        logits = _float_rows(logits)
        assert len(draws) == logits.shape[0], (len(draws), logits.shape)
        rows = pack_draws(draws)
        ids = array("q", bytes(8 * len(draws)))
        if draws:
            self._library.draw(
                *(logits.data_ptr(), logits.shape[0], logits.stride(0), logits.shape[1]),
                *(rows.buffer_info()[0], only_finite, ids.buffer_info()[0], torch.get_num_threads()),
            )
        return ids.tolist()

    def draw_ids(self, logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
        return torch.tensor(self.draw(logits, draws, only_finite=True), dtype=torch.int64)

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
        out_dtype = out_dtype or weight.dtype
        if out_dtype in DTYPES and can_pack(self._library, weight.shape, weight.dtype, order):
            return pack(self._library, self._memory, weight, bias, out_dtype, order)
        return self._torch.pack_linear(weight, bias, out_dtype, order=order)

    def pack_part(
        self, weight: torch.Tensor | QuantizedWeight, dtype: torch.dtype, order: SumOrder
    ) -> PartLinear:
        if isinstance(weight, QuantizedWeight):
            if can_pack_quantized(self._library, weight.codes.shape, dtype):
                return pack_quantized(self._library, self._memory, weight, None, torch.float32, order)
            weight = weight.values().to(dtype)
        if can_pack(self._library, weight.shape, weight.dtype, order):
            return pack(self._library, self._memory, weight, None, torch.float32, order)
        return self._torch.pack_part(weight, dtype, order)

    def pack_quantized(
        self,
        weight: QuantizedWeight,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        out_dtype: torch.dtype | None = None,
        order: SumOrder | None = None,
    ) -> PackedLinear:
        out_dtype = out_dtype or dtype
        if out_dtype in DTYPES and can_pack_quantized(self._library, weight.codes.shape, dtype):
            return pack_quantized(self._library, self._memory, weight, bias, out_dtype, order)
        return self.pack_linear(weight.values().to(dtype), bias, out_dtype, order=order)

    def fuse(self, model: StepModel) -> FusedStep | None:
        return NativeStep(self._library, model) if can_fuse(self._library, model, self._dtype) else None

    def fuse_guesses(self, model: GuessModel) -> FusedGuesses | None:
        can_fuse_them = can_fuse_guesses(self._library, model, self._dtype)
        return NativeGuesses(self._library, model) if can_fuse_them else None


def _heads(x: torch.Tensor) -> torch.Tensor:
    """x (T, heads, d) with dense heads; T may be strided."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def _float_rows(logits: torch.Tensor) -> torch.Tensor:
    """logits (R, V) float32 with dense rows, V at least 1."""
    assert logits.dim() == 2 and logits.shape[1] and logits.dtype == torch.float32, (
        logits.shape,
        logits.dtype,
    )
    return dense_rows(logits)
