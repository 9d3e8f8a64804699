"""Which kernel set a device gets."""

from __future__ import annotations

import logging

import torch

from workers.kernels.compiler import KernelsUnavailable, default_cache, library
from workers.kernels.interface import Kernels
from workers.kernels.library import DTYPES, Library
from workers.kernels.native import CpuKernels
from workers.kernels.reference import TorchKernels

_log = logging.getLogger(__name__)


def load_library() -> Library:
    """The compiled code for this machine; compiles it where need be. Raises KernelsUnavailable."""
    return Library(library(default_cache()))


def kernels_for(device: torch.device, dtype: torch.dtype, *, flashinfer: bool = False) -> Kernels:
    """The fastest kernels that work for `dtype` on `device`. May compile: call once, at load.

    flashinfer: whether a GPU may compute prompts with it, to other bits than what is computed by Triton.
    """
    if dtype not in DTYPES:
        return TorchKernels()
    if device.type == "cuda":
        return _gpu_kernels(device, dtype, flashinfer)
    if device.type != "cpu":
        return TorchKernels()
    try:
        return CpuKernels(load_library(), dtype)
    except KernelsUnavailable as error:
        _log.warning("CPU kernels are not available, using torch operators (several times slower): %s", error)
        return TorchKernels()


def _gpu_kernels(device: torch.device, dtype: torch.dtype, flashinfer: bool) -> Kernels:
    """Imported here alone: machines without a GPU need no Triton."""
    try:
        from workers.kernels.gpu.flash_attention import load_flash_attention
        from workers.kernels.gpu.kernels import GpuKernels
    except ModuleNotFoundError as error:
        _log.warning("Triton is not installed, using torch operators (several times slower): %s", error)
        return TorchKernels()
    return GpuKernels(dtype, load_flash_attention(device) if flashinfer else None)
