"""The builds of the C++ kernels that this machine can run: its own, and those of older CPUs."""

from __future__ import annotations

from pathlib import Path

from workers.kernels.compiler import default_cache, library
from workers.kernels.library import Library

_FLAGS = Path("/proc/cpuinfo").read_text().split()
_V3 = ["x86-64-v3"] if {"avx2", "fma", "bmi2"} <= set(_FLAGS) else []
MARCHES = ["native", "x86-64", *_V3]
PACKED_MARCHES = ["native", *_V3] if _V3 else []  # those with packed products, so with one call a step
HAS_AVX512_BF16 = "avx512_bf16" in _FLAGS


def build(march: str) -> Library:
    return Library(library(default_cache(), march=march))
