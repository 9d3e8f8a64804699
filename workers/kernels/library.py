"""The C entry points of the compiled kernels, with their argument types."""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_float, c_int, c_long, c_void_p
from pathlib import Path

from workers.kernels.compiler import KernelsUnavailable

POINTER, SIZE, FLAG, REAL = c_void_p, c_long, c_int, c_float

SIGNATURES: dict[str, list[type]] = {
    "tandem_rms_norm": [FLAG, POINTER, *[SIZE] * 5, POINTER, REAL, POINTER, FLAG],
    "tandem_add_rms_norm": [FLAG, POINTER, POINTER, SIZE, SIZE, POINTER, REAL, POINTER, FLAG],
    "tandem_rotary_and_write": [
        *[FLAG, POINTER, SIZE, POINTER, SIZE, POINTER, SIZE],
        *[POINTER, POINTER, SIZE, SIZE, SIZE, SIZE, SIZE],
        *[POINTER, POINTER, POINTER, SIZE, SIZE, SIZE, FLAG],
    ],
    "tandem_attention": [
        *[FLAG, POINTER, SIZE, POINTER, POINTER, POINTER, SIZE, SIZE, SIZE],
        *[POINTER, POINTER, POINTER, *[SIZE] * 6, REAL, FLAG],
    ],
    "tandem_silu_mul": [FLAG, POINTER, SIZE, POINTER, SIZE, SIZE, FLAG],
    "tandem_gelu_new": [FLAG, POINTER, POINTER, SIZE, SIZE, FLAG],
    "tandem_draw": [POINTER, SIZE, SIZE, SIZE, POINTER, FLAG, POINTER, FLAG],
    "tandem_free_collective": [POINTER],
    "tandem_abort": [POINTER],
    "tandem_all_reduce": [FLAG, POINTER, POINTER, SIZE],
    "tandem_gather_rows": [POINTER, POINTER, SIZE, POINTER, POINTER],
}
# Only where the CPU has AVX512-BF16, or AVX2 and FMA.
LINEAR_SIGNATURES: dict[str, list[type]] = {
    "tandem_pack": [POINTER, SIZE, SIZE, POINTER, FLAG],
    "tandem_step": [POINTER, POINTER, POINTER, FLAG],
    "tandem_free_step_scratch": [POINTER],
    "tandem_linear": [POINTER, POINTER, SIZE, SIZE, POINTER, FLAG, FLAG],
}
# Only where the CPU has AVX512-BF16.
QUANTIZED_SIGNATURES: dict[str, list[type]] = {
    "tandem_pack_quantized": [FLAG, POINTER, POINTER, POINTER, SIZE, SIZE, POINTER, FLAG],
}


class Library:
    """The loaded library; one attribute per entry point."""

    def __init__(self, path: Path) -> None:
        """Raises KernelsUnavailable where the file cannot be loaded, as from a folder mounted noexec."""
        # torch must have been imported: then its libgomp, of the same name, is the OpenMP runtime of both.
        try:
            loaded = ctypes.CDLL(str(path))
        except OSError as error:
            raise KernelsUnavailable(f"cannot load the compiled kernels: {error}") from error
        self.has_linear = bool(loaded.tandem_has_linear())
        self.has_quantized = bool(loaded.tandem_has_quantized())
        entries = SIGNATURES | (LINEAR_SIGNATURES if self.has_linear else {})
        entries |= QUANTIZED_SIGNATURES if self.has_quantized else {}
        for name, types in entries.items():
            entry = getattr(loaded, name)
            entry.argtypes, entry.restype = types, None
        loaded.tandem_read_all.argtypes, loaded.tandem_read_all.restype = [POINTER, SIZE, FLAG], SIZE
        loaded.tandem_multiply_all.argtypes, loaded.tandem_multiply_all.restype = [SIZE, FLAG], c_double
        self.read_all = loaded.tandem_read_all
        self.multiply_all = loaded.tandem_multiply_all
        self.rms_norm = loaded.tandem_rms_norm
        self.add_rms_norm = loaded.tandem_add_rms_norm
        self.rotary_and_write = loaded.tandem_rotary_and_write
        self.attention = loaded.tandem_attention
        self.silu_mul = loaded.tandem_silu_mul
        self.gelu_new = loaded.tandem_gelu_new
        self.draw = loaded.tandem_draw
        loaded.tandem_collective_bytes.argtypes, loaded.tandem_collective_bytes.restype = [FLAG], SIZE
        loaded.tandem_collective.argtypes = [POINTER, FLAG, FLAG, c_double]
        loaded.tandem_collective.restype = POINTER
        loaded.tandem_failure.argtypes, loaded.tandem_failure.restype = [POINTER], SIZE
        self.collective_bytes = loaded.tandem_collective_bytes
        self.collective = loaded.tandem_collective
        self.free_collective = loaded.tandem_free_collective
        self.abort = loaded.tandem_abort
        self.failure = loaded.tandem_failure
        self.all_reduce = loaded.tandem_all_reduce
        self.gather_rows = loaded.tandem_gather_rows
        if self.has_linear:
            self.pack = loaded.tandem_pack
            self.linear = loaded.tandem_linear
            self.step = loaded.tandem_step
            loaded.tandem_step_scratch.argtypes, loaded.tandem_step_scratch.restype = [], POINTER
            self.step_scratch = loaded.tandem_step_scratch
            self.free_step_scratch = loaded.tandem_free_step_scratch
            loaded.tandem_packed_bytes.argtypes = [SIZE, SIZE]
            loaded.tandem_packed_bytes.restype = SIZE
            self.packed_bytes = loaded.tandem_packed_bytes
        if self.has_quantized:
            self.pack_quantized = loaded.tandem_pack_quantized
            loaded.tandem_quantized_bytes.argtypes = [FLAG, SIZE, SIZE]
            loaded.tandem_quantized_bytes.restype = SIZE
            self.quantized_bytes = loaded.tandem_quantized_bytes
