"""The builds of the C++ kernels that this machine can run: its own, those of older CPUs, one in software."""

from __future__ import annotations

from pathlib import Path

from workers.kernels.compiler import default_cache, library
from workers.kernels.library import Library

CPU_FLAGS = frozenset(Path("/proc/cpuinfo").read_text().split())
HAS_AVX512_BF16 = "avx512_bf16" in CPU_FLAGS
TILES = "software-tiles"  # the machine's own with cpu/amx_software.h in place of tile registers
_V3 = ["x86-64-v3"] if {"avx2", "fma", "bmi2"} <= CPU_FLAGS else []
MARCHES = ["native", "x86-64", *_V3]
# Those with packed products, so with one call a step.
PACKED = (["native", *_V3] if _V3 else []) + [TILES] * HAS_AVX512_BF16
TILE_BUILDS = [TILES] + ["native"] * ("amx_bf16" in CPU_FLAGS)  # to be skipped without AVX512-BF16


def build(name: str) -> Library:
    if name == TILES:
        return Library(library(default_cache(), defines=("SOFTWARE_TILES",)))
    return Library(library(default_cache(), march=name))
