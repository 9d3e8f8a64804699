"""What this machine can do at most: arithmetic and reading of memory, measured in a few tenths of a second.

Measured with the loads and products of our kernels where they are built, else with torch's. The best of some
samples counts: a ceiling is what the machine does when nothing disturbs it, and other groups may be starting
beside this one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import torch

from workers.engine.meter import Ceilings
from workers.kernels.compiler import KernelsUnavailable, default_cache, library
from workers.kernels.library import Library
from workers.kernels.memory import huge_bytes

_SAMPLES: Final = 4
_READ_BYTES: Final = {"cpu": 128 << 20, "cuda": 256 << 20}  # far beyond the caches
_ROUNDS: Final = 20_000  # of register tiles a thread
_SIDE: Final = {"cpu": 768, "cuda": 4096}  # of square matrices, where there are no kernels


def measure_ceilings(device: torch.device, dtype: torch.dtype, num_threads: int) -> Ceilings:
    """Of one machine's CPU over `num_threads`, or of one GPU."""
    kind = "cuda" if device.type == "cuda" else "cpu"
    read, multiply = _by_torch(device, dtype, kind) if kind == "cuda" else _by_kernels(dtype, num_threads)
    found = Ceilings(flop_per_s=_best(multiply, device), read_bytes_per_s=_best(read, device))
    if kind == "cuda":
        del read, multiply  # with their memory
        torch.cuda.empty_cache()
    return found


def of_group(one: Ceilings, num_machines: float) -> Ceilings:
    """Of equal machines, or GPUs, together."""
    return Ceilings(
        flop_per_s=one.flop_per_s * num_machines, read_bytes_per_s=one.read_bytes_per_s * num_machines
    )


def _best(work: Callable[[], float], device: torch.device) -> float:
    """Amount a second of the quickest of some runs."""
    rates = []
    for _ in range(_SAMPLES + 1):  # the first one also touches memory and starts threads
        began = time.perf_counter()
        amount = work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        rates.append(amount / (time.perf_counter() - began))
    return max(rates[1:])


def _by_kernels(dtype: torch.dtype, num_threads: int) -> tuple[Callable[[], float], Callable[[], float]]:
    try:
        kernels = Library(library(default_cache()))
    except KernelsUnavailable:
        return _by_torch(torch.device("cpu"), dtype, "cpu")
    memory = huge_bytes(_READ_BYTES["cpu"]).fill_(1)

    def read() -> float:
        return float(kernels.read_all(memory.data_ptr(), memory.nbytes, num_threads))

    def multiply() -> float:
        return float(kernels.multiply_all(_ROUNDS, num_threads))

    if dtype is not torch.bfloat16 or not kernels.has_linear:  # float32 goes through torch
        return read, _by_torch(torch.device("cpu"), dtype, "cpu")[1]
    return read, multiply


def _by_torch(
    device: torch.device, dtype: torch.dtype, kind: str
) -> tuple[Callable[[], float], Callable[[], float]]:
    memory = torch.ones(_READ_BYTES[kind] // 4, dtype=torch.float32, device=device)
    left = torch.randn(_SIDE[kind], _SIDE[kind], device=device).to(dtype)

    def read() -> float:
        memory.sum()
        return float(memory.nbytes)

    def multiply() -> float:
        torch.mm(left, left)
        return 2.0 * _SIDE[kind] ** 3

    return read, multiply
