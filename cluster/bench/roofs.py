"""The ceilings of this machine, measured with the loads and products that our kernels use.

Products have a ceiling in each dtype. In float32 a CPU's are torch's, and a GPU's are three in TF32
(`cluster.plan.devices`).
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from cluster.plan.devices import FLOAT32_SHARE, Roofs
from workers.kernels.compiler import KernelsUnavailable, default_cache, library
from workers.kernels.library import Library
from workers.kernels.memory import huge_bytes

READ_BYTES = 1 << 29  # far beyond any cache of a CPU
SQUARE = 1024  # side of the matrices where the kernels are not available
GPU_READ_BYTES = 4 << 30
GPU_SQUARE = 8192


class RoofMeter:
    """Measures read and matrix rate; one sample takes about a tenth of a second."""

    def __init__(self, read_bytes: int = READ_BYTES) -> None:
        self._memory = huge_bytes(read_bytes // 8 * 8).view(torch.int64).fill_(1)  # where weights lie, too
        self._floats = torch.randn(SQUARE, SQUARE)
        self._left = self._floats.bfloat16()
        try:
            found: Library | None = Library(library(default_cache()))
        except KernelsUnavailable:
            found = None
        self._library = found
        self._reads: list[float] = []
        self._products: list[float] = []
        self._float_products: list[float] = []

    def sample(self) -> None:
        """Adds one sample of each; called between works, so that the machine is met in all its moods."""
        self._reads.append(_rate(self._read))
        self._products.append(_rate(self._multiply))
        self._float_products.append(_rate(self._multiply_floats))

    def roofs(self, dtype: str = "bfloat16") -> Roofs:
        """The best samples: a ceiling is what the machine can do when nothing disturbs it."""
        products = self._float_products if dtype == "float32" else self._products
        return Roofs(read_bytes_per_s=max(self._reads), flop_per_s=max(products))

    def samples(self) -> dict[str, list[float]]:
        return {
            "read_bytes_per_s": list(self._reads),
            "flop_per_s": list(self._products),
            "float32_flop_per_s": list(self._float_products),
        }

    def _read(self) -> float:
        threads = torch.get_num_threads()
        if self._library is None:
            self._memory.sum()
            return self._memory.nbytes
        return float(self._library.read_all(self._memory.data_ptr(), self._memory.nbytes, threads))

    def _multiply(self) -> float:
        if self._library is not None and self._library.has_linear:
            return float(self._library.multiply_all(100_000, torch.get_num_threads()))
        torch.mm(self._left, self._left)
        return 2.0 * SQUARE**3

    def _multiply_floats(self) -> float:
        torch.mm(self._floats, self._floats)
        return 2.0 * SQUARE**3


class GpuRoofMeter:
    """The same of a GPU, by torch's own sum and bfloat16 product."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        read_bytes = min(GPU_READ_BYTES, torch.cuda.mem_get_info(device)[0] // 2)  # the engine has its share
        self._memory = torch.ones(read_bytes // 4, dtype=torch.float32, device=device)
        self._left = torch.randn(GPU_SQUARE, GPU_SQUARE, device=device).bfloat16()
        self._reads: list[float] = []
        self._products: list[float] = []
        self.sample()  # libraries load
        self._reads.clear()
        self._products.clear()

    def sample(self) -> None:
        self._reads.append(_rate(self._read))
        self._products.append(_rate(self._multiply))

    def roofs(self, dtype: str = "bfloat16") -> Roofs:
        flop_per_s = max(self._products) * (FLOAT32_SHARE if dtype == "float32" else 1.0)
        return Roofs(read_bytes_per_s=max(self._reads), flop_per_s=flop_per_s)

    def samples(self) -> dict[str, list[float]]:
        return {"read_bytes_per_s": list(self._reads), "flop_per_s": list(self._products)}

    def _read(self) -> float:
        self._memory.sum()
        torch.cuda.synchronize(self._device)
        return self._memory.nbytes

    def _multiply(self) -> float:
        for _ in range(8):
            torch.mm(self._left, self._left)
        torch.cuda.synchronize(self._device)
        return 8 * 2.0 * GPU_SQUARE**3


def roof_meter(device: str) -> RoofMeter | GpuRoofMeter:
    """For `cpu` or `cuda`."""
    return GpuRoofMeter(torch.device(device)) if device == "cuda" else RoofMeter()


def _rate(work: Callable[[], float]) -> float:
    started = time.perf_counter()
    amount = work()
    return amount / (time.perf_counter() - started)
