"""Compiles every kernel for an H100 or H200 on any machine: compiler and assembler come with Triton.

A program, for it takes the place of Triton's launcher: prints a line of JSON for each launch. Its argument is
a folder for temporary files.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tests.unit.kernels.batches import make_batch
from workers.kernels import Quantization
from workers.kernels.gpu.activation import gelu_tanh, silu_mul
from workers.kernels.gpu.attention import paged_attention
from workers.kernels.gpu.draw import draw_ids
from workers.kernels.gpu.kernels import GpuKernels
from workers.kernels.gpu.norms import add_rms_norm, layer_norm, rms_norm
from workers.kernels.gpu.rotary import rotary_and_write

_DUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
_DTYPE = torch.bfloat16


class Hopper:
    """What Triton asks of a driver before it compiles."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def compile_instead(kernel: JITFunction, grid: tuple[int, ...]) -> Any:
    def launch(*args: object, **options: object) -> None:
        compiled = kernel.warmup(*args, grid=grid, **options)
        binary = Path(sys.argv[1]) / "kernel.cubin"
        binary.write_bytes(compiled.asm["cubin"])
        usage = subprocess.run(
            [_DUMP, "--dump-resource-usage", binary], capture_output=True, text=True, timeout=60, check=True
        ).stdout
        found = {
            "kernel": kernel.fn.__name__,
            "registers": int(re.findall(r"REG:(\d+)", usage)[0]),
            "stack_bytes": int(re.findall(r"STACK:(\d+)", usage)[0]),
            "shared_bytes": compiled.metadata.shared,
            "matrix_products": compiled.asm["ptx"].count("wgmma.mma_async"),
        }
        print(json.dumps(found), flush=True)

    return launch


def launch_all() -> None:
    hidden, heads, kv_heads, dim = 4096, 32, 8, 128
    x, weight = torch.zeros(8, hidden, dtype=_DTYPE), torch.zeros(hidden, dtype=_DTYPE)
    rms_norm(x, weight, 1e-5)
    rms_norm(x.view(8, heads, dim), weight[:dim], 1e-5)
    add_rms_norm(x, x, weight, 1e-5)
    layer_norm(x, weight, weight, 1e-5)
    silu_mul(x)
    gelu_tanh(x)
    batch = make_batch([(1000, 1), (300, 1)], 16, 90)
    q, k = torch.zeros(2, heads, dim, dtype=_DTYPE), torch.zeros(2, kv_heads, dim, dtype=_DTYPE)
    angles = torch.zeros(2, dim // 2)
    pages, codes = (torch.zeros(90, kv_heads, 16, dim, dtype=dtype) for dtype in (_DTYPE, torch.int8))
    scales = torch.zeros(90, kv_heads, 16, dtype=torch.float16)
    for cache, steps in ((pages, None), (codes, (scales, scales))):
        rotary_and_write(q, k, k, (angles, angles), batch.slots, cache, cache, steps)
        paged_attention(q, cache, cache, steps, batch, scale=0.1, sliding_window=None, soft_cap=None)
    tree = replace(batch, parents=torch.zeros(2, dtype=torch.int32))
    paged_attention(q, pages, pages, None, tree, scale=0.1, sliding_window=None, soft_cap=None)
    prompt = make_batch([(0, 100)], 16, 90)
    for window, cap in ((None, None), (512, 50.0)):
        q = torch.zeros(100, heads, dim, dtype=_DTYPE)
        paged_attention(q, pages, pages, None, prompt, scale=0.1, sliding_window=window, soft_cap=cap)
    kernels = GpuKernels(_DTYPE)
    for form in (Quantization.NONE, Quantization.INT8, Quantization.INT4):
        linear = kernels.pack_linear(torch.zeros(64, hidden, dtype=_DTYPE), None, None, form)
        for rows in (1, 100, 1000):
            linear(torch.zeros(rows, hidden, dtype=_DTYPE))
    draw_ids(torch.zeros(2, 128256), torch.zeros(2, 5, dtype=torch.float64), only_finite=True)


if __name__ == "__main__":
    driver.set_active(Hopper())
    JITFunction.__getitem__ = compile_instead
    launch_all()
