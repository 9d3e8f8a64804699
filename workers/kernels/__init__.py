"""Operators of the decoder: a torch reference for any device, C++ for the CPU."""

from workers.kernels.batch import StepBatch
from workers.kernels.choose import kernels_for, load_library
from workers.kernels.collective import CollectiveFailed, SharedCollective, memory_bytes
from workers.kernels.compiler import KernelsUnavailable
from workers.kernels.draw import NOT_FINITE, Draw
from workers.kernels.interface import FusedStep, Kernels, PackedLinear, StepLayer, StepModel
from workers.kernels.library import Library
from workers.kernels.quantized import Quantization
from workers.kernels.reference import TorchKernels

__all__ = [
    "NOT_FINITE",
    "CollectiveFailed",
    "Draw",
    "FusedStep",
    "Kernels",
    "KernelsUnavailable",
    "Library",
    "PackedLinear",
    "Quantization",
    "SharedCollective",
    "StepBatch",
    "StepLayer",
    "StepModel",
    "TorchKernels",
    "kernels_for",
    "load_library",
    "memory_bytes",
]
