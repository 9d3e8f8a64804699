"""Every Triton kernel against its torch form, over the shapes that models have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from benchmarks.gpu_check.findings import check
from benchmarks.gpu_check.settings import Settings
from workers.kernels import (
    CacheForm,
    Draw,
    LayerCache,
    PagedCache,
    Quantization,
    StepBatch,
    TorchKernels,
    build_batch,
    pack_step,
    unpack,
)
from workers.kernels.gpu.interpreter import is_interpreter, mend
from workers.kernels.gpu.kernels import GpuKernels
from workers.kernels.paged_cache import dequantize_rows, quantize_rows

_REFERENCE = TorchKernels()
_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


class Attention(NamedTuple):
    """A shape of attention, and (tokens in the pool, tokens of this step) of the sequences."""

    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    sequences: Sequence[tuple[int, int]]
    window: int | None = None
    soft_cap: float | None = None


_DECODE = ((0, 1), (15, 1), (255, 1), (256, 1), (700, 1), (4000, 1))
_CHUNKS = ((0, 1), (0, 130), (100, 64), (1000, 33), (4095, 1), (31, 2))
# Each shape is compiled anew, for seconds.
_SHAPES = {
    torch.bfloat16: (
        Attention(32, 32, 128, 16, _DECODE),
        Attention(32, 32, 128, 16, _CHUNKS),
        Attention(32, 8, 128, 16, _DECODE),
        Attention(32, 8, 128, 16, _CHUNKS),
        Attention(8, 1, 64, 8, _CHUNKS),
        Attention(12, 4, 80, 32, _CHUNKS),
        Attention(8, 8, 96, 16, _DECODE),
        Attention(8, 2, 256, 16, _CHUNKS),
        Attention(32, 8, 128, 16, _CHUNKS, window=64),
        Attention(8, 4, 256, 16, _DECODE, soft_cap=50.0),
    ),
    torch.float32: (
        Attention(32, 8, 128, 16, _DECODE),
        Attention(32, 8, 128, 16, _CHUNKS),
        Attention(14, 2, 64, 8, _DECODE, window=300),
    ),
}
_DRY_SHAPES = (
    Attention(4, 2, 16, 8, ((0, 1), (9, 1), (20, 1))),
    Attention(4, 1, 24, 8, ((0, 3), (9, 5)), window=6),
)


def check_kernels(settings: Settings) -> None:
    if is_interpreter():
        mend()
    device = torch.device(settings.device)
    for dtype in (torch.float32, torch.bfloat16):
        maker = _Maker(device, dtype)
        _check_rows(maker, settings)
        for shape in _DRY_SHAPES if settings.is_dry else _SHAPES[dtype]:
            _check_attention(maker, shape, dtype)
        _check_attention(maker, (_DRY_SHAPES if settings.is_dry else _SHAPES[dtype])[1], torch.int8)
        _check_products(maker, settings)
    _check_draws(_Maker(device, torch.float32), settings)


class _Maker:
    """Makes noise, and compares what both kinds of kernels make of it."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype
        self.kernels = GpuKernels(dtype)
        self._generator = torch.Generator().manual_seed(1)

    def noise(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator).to(self.dtype).to(self.device)

    def compare(self, name: str, found: torch.Tensor, wanted: torch.Tensor, factor: float = 1.0) -> None:
        """By the largest difference, as a share of the larger of 1 and the number."""
        scale = wanted.float().abs().clamp(min=1.0)
        difference = float(((found.float() - wanted.float()).abs() / scale).max()) if found.numel() else 0.0
        is_right = difference <= factor * _TOLERANCES[self.dtype]  # NaN is not
        name = f"{name} {str(self.dtype).removeprefix('torch.')}"
        check(name, is_right and found.dtype == wanted.dtype, difference=difference)


def _check_rows(maker: _Maker, settings: Settings) -> None:
    widths = (64, 96) if settings.is_dry else (64, 896, 4096, 11008)
    for width in widths:
        x, residual, weight, bias = maker.noise(5, width), maker.noise(5, width), maker.noise(width), None
        ours, theirs = maker.kernels, _REFERENCE
        maker.compare(f"rms_norm {width}", ours.rms_norm(x, weight, 1e-5), theirs.rms_norm(x, weight, 1e-5))
        wanted = theirs.add_rms_norm(x, residual.clone(), weight, 1e-5)
        found = ours.add_rms_norm(x, residual.clone(), weight, 1e-5)
        for part, one, other in zip(("norm", "sum"), found, wanted, strict=True):
            maker.compare(f"add_rms_norm {part} {width}", one, other)
        maker.compare(
            f"layer_norm {width}",
            ours.layer_norm(x, weight, bias, 1e-5),
            theirs.layer_norm(x, weight, bias, 1e-5),
        )
        both = maker.noise(5, 2 * width)
        maker.compare(f"silu_mul {width}", ours.silu_mul(both), theirs.silu_mul(both))
        maker.compare(f"gelu_new {width}", ours.gelu_new(x), theirs.gelu_new(x))


def _check_attention(maker: _Maker, shape: Attention, cache_dtype: torch.dtype) -> None:
    batch, num_blocks = _batch(shape, maker.device)
    tokens, dim = batch.token_ids.shape[0], shape.head_dim
    form = CacheForm(
        num_kv_heads=shape.kv_heads,
        num_layers=1,
        block_size=shape.block_size,
        head_dim=dim,
        dtype=cache_dtype,
    )
    pool = PagedCache.zeros(num_blocks, form).clone(maker.device)
    noise = maker.noise(*pool.numbers.shape)
    if pool.scales is None:
        pool.numbers.copy_(noise)
    else:
        codes, scales = quantize_rows(noise)
        pool.numbers.copy_(codes)
        pool.scales.copy_(scales)
    twin = pool.clone()
    qkv = maker.noise(tokens, shape.heads + 2 * shape.kv_heads, dim)
    angles = batch.positions[:, None] * torch.rand(dim // 2, device=maker.device)
    results = []
    for kernels, memory in ((maker.kernels, pool), (_REFERENCE, twin)):
        q, k, v = qkv.clone().split_with_sizes([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
        cache = memory.layers[0]
        q = kernels.rotary_and_write(q, k, v, angles.cos(), angles.sin(), batch, cache)
        attended = kernels.paged_attention(q, cache, batch, dim**-0.5, shape.window, shape.soft_cap)
        results.append((q, _values(cache), attended))
    label = f"{shape.heads}/{shape.kv_heads} d{dim} blocks of {shape.block_size}, {tokens} tokens"
    if shape.window:
        label += f", window {shape.window}"
    if pool.scales is not None:
        label += ", int8 pool"
    for part, found, wanted in zip(("rotary", "KV write", "attention"), *results, strict=True):
        # Where numbers differ in their last bits, codes may differ by one.
        maker.compare(f"{part} {label}", found, wanted, 1.0 if pool.scales is None else 3.0)


def _values(cache: LayerCache) -> torch.Tensor:
    """Keys and values of a layer, (2, num_blocks, kv_heads, block_size, d)."""
    if cache.scales is None:
        return torch.stack((cache.keys, cache.values))
    key_scales, value_scales = cache.scales
    return torch.stack((dequantize_rows(cache.keys, key_scales), dequantize_rows(cache.values, value_scales)))


def _batch(shape: Attention, device: torch.device) -> tuple[StepBatch, int]:
    """With its blocks scattered over a pool of that size."""
    counts = [-(-(start + length) // shape.block_size) for start, length in shape.sequences]
    num_blocks = sum(counts) + 3
    blocks = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(2)).tolist()
    tokens = sum(length for _, length in shape.sequences)
    message = pack_step(
        lens=[length for _, length in shape.sequences],
        starts=[start for start, _ in shape.sequences],
        block_counts=counts,
        token_ids=[0] * tokens,
        blocks=blocks[: sum(counts)],
        logit_rows=(),
    )
    batch = build_batch(
        unpack(message), block_size=shape.block_size, num_blocks=num_blocks, vocab_size=1, device=device
    )
    return batch, num_blocks


def _check_products(maker: _Maker, settings: Settings) -> None:
    shapes = ((64, 96),) if settings.is_dry else ((4096, 11008), (896, 4864))
    rows = (1, 5) if settings.is_dry else (1, 3, 16, 64, 200, 1024)
    for inputs, outputs in shapes:
        weight, bias = maker.noise(outputs, inputs) * inputs**-0.5, maker.noise(outputs)
        for quantization in (Quantization.NONE, Quantization.INT8, Quantization.INT4):
            if quantization is Quantization.INT4 and settings.is_dry:
                continue  # minutes in the interpreter
            ours = maker.kernels.pack_linear(weight, bias, None, quantization)
            theirs = _REFERENCE.pack_linear(weight, bias, None, quantization)
            for count in rows:
                x = maker.noise(count, inputs)
                name = f"product {quantization.value} {inputs}x{outputs} rows {count}"
                factor = 1.0 if quantization is Quantization.NONE else 3.0  # inputs may be rounded to 8 bits
                maker.compare(name, ours(x), theirs(x), factor)


def _check_draws(maker: _Maker, settings: Settings) -> None:
    vocab_size, rows = (300, 6) if settings.is_dry else (32000, 64)
    logits = maker.noise(rows, vocab_size) * 2
    filters: dict[str, Callable[[float], Draw]] = {
        "best": lambda u: Draw(0.0, 0, 1.0, 0.0, u),
        "temperature": lambda u: Draw(0.7, 0, 1.0, 0.0, u),
        "top-k": lambda u: Draw(1.0, 20, 1.0, 0.0, u),
        "top-p": lambda u: Draw(1.0, 0, 0.8, 0.0, u),
        "min-p": lambda u: Draw(1.3, 0, 1.0, 0.1, u),
        "all": lambda u: Draw(0.9, 40, 0.9, 0.02, u),
    }
    for name, draw in filters.items():
        draws = [draw((7 * row + 3) % 101 / 101) for row in range(rows)]
        found, wanted = maker.kernels.draw(logits, draws), _REFERENCE.draw(logits, draws)
        # A draw on the very border of an id may fall to either side: sums are added in another order.
        num_other = sum(a != b for a, b in zip(found, wanted, strict=True))
        check(f"draw {name}", num_other <= (0 if name == "best" else rows // 32), others=num_other)
    logits[1, 5] = float("nan")
    best = [filters["best"](0.0)] * rows
    found, wanted = (each.draw(logits, best, only_finite=True) for each in (maker.kernels, _REFERENCE))
    check("draw of a row that is not finite", found == wanted)
