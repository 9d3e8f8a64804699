"""Operators of the decoder: a torch reference for any device, C++ for the CPU."""

from workers.kernels.batch import StepBatch
from workers.kernels.choose import kernels_for
from workers.kernels.draw import Draw
from workers.kernels.interface import FusedStep, Kernels, PackedLinear, StepLayer, StepModel
from workers.kernels.reference import TorchKernels

__all__ = [
    "Draw",
    "FusedStep",
    "Kernels",
    "PackedLinear",
    "StepBatch",
    "StepLayer",
    "StepModel",
    "TorchKernels",
    "kernels_for",
]
