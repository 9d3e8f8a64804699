"""The random numbers of sampling on the device: Philox 4x32-10 (Salmon et al., SC 2011), a counter hash.

The same numbers as `workers.runtime.philox.uniform` draws on the host, for steps that follow each other
without it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def uniforms(seeds: torch.Tensor, positions: torch.Tensor, choices: torch.Tensor) -> torch.Tensor:
    """Numbers in [0, 1) with 53 random bits, (n,) float64, for n tokens. Arguments (n,) int64."""
    out = torch.empty(seeds.shape, dtype=torch.float64, device=seeds.device)
    if seeds.numel():
        seeds, positions, choices = seeds.contiguous(), positions.contiguous(), choices.contiguous()
        width = 128
        _uniforms[(triton.cdiv(seeds.numel(), width),)](
            seeds, positions, choices, out, seeds.numel(), WIDTH=width, num_warps=1
        )
    return out


@triton.jit(do_not_specialize=["count"])
def _uniforms(seeds, positions, choices, out, count, WIDTH: tl.constexpr):
    at = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    is_real = at < count
    seed = tl.load(seeds + at, mask=is_real, other=0)
    position = tl.load(positions + at, mask=is_real, other=0).to(tl.uint32)
    choice = tl.load(choices + at, mask=is_real, other=0).to(tl.uint32)
    none = tl.zeros([WIDTH], tl.uint32)
    first, second, _, _ = tl.philox(seed, position, choice, none, none)
    high, low = (first >> 5).to(tl.float64), (second >> 6).to(tl.float64)
    tl.store(out + at, (high * 67108864.0 + low) * 1.1102230246251565e-16, mask=is_real)
