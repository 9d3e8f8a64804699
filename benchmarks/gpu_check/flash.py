"""Prompts by FlashInfer, where it is installed: against the reference, against themselves in steps of their
own, and their time beside Triton's."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec

import torch

from benchmarks.gpu_check.findings import check, figure
from benchmarks.gpu_check.kernels import Attention
from benchmarks.gpu_check.settings import Settings
from workers.kernels import (
    CacheForm,
    Kernels,
    LayerCache,
    PagedCache,
    StepBatch,
    TorchKernels,
    build_batch,
    pack_step,
    unpack,
)
from workers.kernels.gpu.flash_attention import load_flash_attention
from workers.kernels.gpu.kernels import GpuKernels

_DTYPE, _TOLERANCE, _RUNS = torch.bfloat16, 2e-2, 10
_CHUNKS = ((0, 1), (0, 130), (100, 64), (1000, 33), (4095, 1), (31, 2))
_SHAPES = (
    Attention(32, 32, 128, 16, _CHUNKS),
    Attention(32, 8, 128, 16, _CHUNKS),
    Attention(8, 1, 64, 8, _CHUNKS),
    Attention(8, 2, 256, 16, _CHUNKS),
    Attention(32, 8, 128, 16, _CHUNKS, window=64),
    Attention(8, 4, 128, 16, _CHUNKS, window=200, soft_cap=30.0),
)
_MEASURED = {
    "2048": ((0, 2048),),
    "8192": ((0, 8192),),
    "512 after 7680": ((7680, 512),),
    "512 beside 64 decode rows": (*[(700, 1)] * 64, (0, 512)),
}


def check_flash(settings: Settings) -> None:
    """Says one line where there is nothing to check."""
    if settings.is_dry or find_spec("flashinfer") is None:
        figure("skipped: " + ("a dry run has no GPU" if settings.is_dry else "flashinfer is not installed"))
        return
    device = torch.device(settings.device)
    flash = load_flash_attention(device)
    if flash is None:
        figure("skipped: flashinfer is installed, but not as the engine knows it")
        return
    triton, both = GpuKernels(_DTYPE), GpuKernels(_DTYPE, flash)
    for shape in _SHAPES:
        _compare(_Case(shape, device), both)
    check("flashinfer computes", not flash.is_broken)
    for name, sequences in _MEASURED.items():
        case = _Case(Attention(32, 32, 128, 16, sequences), device)  # Llama-2-7B
        step = case.batch()

        def with_plan(case: _Case = case, step: StepBatch = step) -> torch.Tensor:
            return case.attend(both, replace(step))  # a step that was not planned yet

        figure(
            f"attention of {name}",
            triton_ms=1e3 * _best_s(partial(case.attend, triton, step)),
            flashinfer_ms=1e3 * _best_s(partial(case.attend, both, step)),
            with_plan_ms=1e3 * _best_s(with_plan),
        )


class _Case:
    """Sequences over a pool of noise, and queries of all their rows."""

    def __init__(self, shape: Attention, device: torch.device) -> None:
        self.shape, self._device = shape, device
        counts = [-(-(start + length) // shape.block_size) for start, length in shape.sequences]
        self._num_blocks = sum(counts)
        generator = torch.Generator().manual_seed(2)
        order = torch.randperm(self._num_blocks, generator=generator).tolist()
        self._blocks = [[order.pop() for _ in range(count)] for count in counts]
        form = CacheForm(
            num_kv_heads=shape.kv_heads,
            num_layers=1,
            block_size=shape.block_size,
            head_dim=shape.head_dim,
            dtype=_DTYPE,
        )
        pool = PagedCache.zeros(self._num_blocks, form).clone(device)
        pool.numbers.normal_()
        self._cache: LayerCache = pool.layers[0]
        rows = sum(length for _, length in shape.sequences)
        self.q = torch.randn(rows, shape.heads, shape.head_dim, device=device).to(_DTYPE)

    def batch(self, chosen: Sequence[int] | None = None) -> StepBatch:
        """Of some of the sequences; None: of all."""
        chosen = range(len(self.shape.sequences)) if chosen is None else chosen
        slices = [self.shape.sequences[each] for each in chosen]
        message = pack_step(
            lens=[length for _, length in slices],
            starts=[start for start, _ in slices],
            block_counts=[len(self._blocks[each]) for each in chosen],
            token_ids=[0] * sum(length for _, length in slices),
            blocks=[block for each in chosen for block in self._blocks[each]],
            logit_rows=(),
        )
        return build_batch(
            unpack(message),
            block_size=self.shape.block_size,
            num_blocks=self._num_blocks,
            vocab_size=1,
            device=self._device,
        )

    def attend(self, kernels: Kernels, batch: StepBatch, rows: slice = slice(None)) -> torch.Tensor:
        scale, shape = self.shape.head_dim**-0.5, self.shape
        return kernels.paged_attention(self.q[rows], self._cache, batch, scale, shape.window, shape.soft_cap)


def _compare(case: _Case, kernels: Kernels) -> None:
    shape, batch = case.shape, case.batch()
    label = f"{shape.heads}/{shape.kv_heads} d{shape.head_dim}, window {shape.window}, cap {shape.soft_cap}"
    found, wanted = case.attend(kernels, batch), case.attend(TorchKernels(), batch)
    difference = float(((found - wanted).abs() / wanted.abs().clamp(min=1.0)).max())
    check(f"flashinfer {label}", difference <= _TOLERANCE, difference=difference)
    check(f"flashinfer {label}, again", torch.equal(case.attend(kernels, replace(batch)), found))
    num_other, first = 0, 0
    for sequence, (_, length) in enumerate(shape.sequences):
        rows = slice(first, first + length)
        alone = case.attend(kernels, case.batch([sequence]), rows)
        num_other += int((alone != found[rows]).flatten(1).any(1).sum())
        first += length
    figure(f"flashinfer {label}: rows with other bits in a step of their own", rows=num_other)


def _best_s(work: Callable[[], object]) -> float:
    """Of some runs, after one that may compile."""
    work()
    seconds = []
    for _ in range(_RUNS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return min(seconds)
