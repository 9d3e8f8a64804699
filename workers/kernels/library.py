"""The C entry points of the compiled kernels, with their argument types."""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_float, c_int, c_long, c_void_p
from pathlib import Path
from typing import Any

import torch

from workers.kernels.compiler import KernelsUnavailable

DTYPES = {torch.float32: 0, torch.bfloat16: 1}  # as the entry points number them
POINTER, SIZE, FLAG, REAL = c_void_p, c_long, c_int, c_float


class Library:
    """The loaded library; one attribute per entry point, `tandem_NAME` in kernels.cpp."""

    def __init__(self, path: Path) -> None:
        """Raises KernelsUnavailable where the file cannot be loaded, as from a folder mounted noexec."""
        # torch has been imported, so its libgomp, of the same name, is the OpenMP runtime of both.
        try:
            loaded = ctypes.CDLL(str(path))
        except OSError as error:
            raise KernelsUnavailable(f"cannot load the compiled kernels: {error}") from error

        def entry(name: str, *arguments: type, returns: type | None = None) -> Any:
            found = loaded[f"tandem_{name}"]
            found.argtypes, found.restype = arguments, returns
            return found

        self.read_all = entry("read_all", POINTER, SIZE, FLAG, returns=SIZE)
        self.multiply_all = entry("multiply_all", SIZE, FLAG, returns=c_double)
        self.rms_norm = entry("rms_norm", FLAG, POINTER, *[SIZE] * 5, POINTER, REAL, POINTER, FLAG)
        self.add_rms_norm = entry(
            "add_rms_norm", FLAG, POINTER, POINTER, SIZE, SIZE, POINTER, REAL, POINTER, FLAG
        )
        self.rotary_and_write = entry(
            "rotary_and_write",
            *(FLAG, POINTER, SIZE, POINTER, SIZE, POINTER, SIZE),
            *(POINTER, POINTER, *[SIZE] * 5, POINTER, FLAG, POINTER, POINTER, *[SIZE] * 3, FLAG),
        )
        self.attention = entry(
            "attention",
            *(FLAG, POINTER, SIZE, POINTER, FLAG, POINTER, POINTER, *[SIZE] * 3),
            *(POINTER, POINTER, POINTER, POINTER, *[SIZE] * 6, REAL, REAL, FLAG),
        )
        self.silu_mul = entry("silu_mul", FLAG, POINTER, SIZE, POINTER, SIZE, SIZE, FLAG)
        self.silu = entry("silu", FLAG, POINTER, POINTER, SIZE, SIZE, FLAG)
        self.gelu = entry("gelu", FLAG, POINTER, POINTER, SIZE, SIZE, FLAG)
        self.gelu_new = entry("gelu_new", FLAG, POINTER, POINTER, SIZE, SIZE, FLAG)
        self.draw = entry("draw", POINTER, *[SIZE] * 3, POINTER, FLAG, POINTER, FLAG)
        self.collective_bytes = entry("collective_bytes", FLAG, returns=SIZE)
        self.collective = entry("collective", POINTER, FLAG, FLAG, c_double, returns=POINTER)
        self.free_collective = entry("free_collective", POINTER)
        self.abort = entry("abort", POINTER)
        self.failure = entry("failure", POINTER, returns=SIZE)
        self.all_reduce = entry("all_reduce", FLAG, POINTER, POINTER, SIZE)
        self.join = entry("join", FLAG, POINTER, POINTER, SIZE, SIZE, *[POINTER] * 4)
        self.gather_rows = entry("gather_rows", POINTER, POINTER, SIZE, POINTER, POINTER)
        self.map_shared = entry("map_shared", FLAG, SIZE, returns=SIZE)
        self.collapse_shared = entry("collapse_shared", POINTER, SIZE, returns=FLAG)
        self.unmap_shared = entry("unmap_shared", POINTER, SIZE)
        self.send_answer = entry("send_answer", POINTER, FLAG, SIZE, returns=SIZE)
        self.receive_answer = entry(
            "receive_answer", POINTER, FLAG, c_double, POINTER, SIZE, POINTER, SIZE, returns=SIZE
        )
        self.has_linear = bool(entry("has_linear", returns=FLAG)())
        self.has_quantized = bool(entry("has_quantized", returns=FLAG)())
        if self.has_linear:  # where the CPU has AVX512-BF16, or AVX2 and FMA
            self.can_use_tiles = bool(entry("can_use_tiles", returns=FLAG)())
            self.packed_bytes = entry("packed_bytes", FLAG, SIZE, SIZE, returns=SIZE)
            self.pack = entry("pack", FLAG, POINTER, SIZE, SIZE, POINTER, FLAG)
            self.linear = entry("linear", POINTER, POINTER, SIZE, SIZE, POINTER, FLAG, FLAG)
            self.step = entry("step", POINTER, POINTER, POINTER, SIZE, POINTER, FLAG, returns=FLAG)
            self.step_scratch = entry("step_scratch", returns=POINTER)
            self.free_step_scratch = entry("free_step_scratch", POINTER)
            self.guess = entry("guess", POINTER, POINTER, POINTER, FLAG, returns=FLAG)
            self.guess_scratch = entry("guess_scratch", returns=POINTER)
            self.free_guess_scratch = entry("free_guess_scratch", POINTER)
        if self.has_quantized:  # where it has AVX512-BF16
            self.quantized_bytes = entry("quantized_bytes", FLAG, SIZE, SIZE, returns=SIZE)
            self.pack_quantized = entry(
                "pack_quantized", FLAG, POINTER, POINTER, POINTER, SIZE, SIZE, POINTER, FLAG
            )
