"""Which kernels a CUDA device gets."""

from __future__ import annotations

import sys

import pytest
import torch

from workers.kernels import TorchKernels, kernels_for
from workers.kernels.gpu.kernels import GpuKernels

CUDA = torch.device("cuda")


def test_those_in_triton() -> None:
    assert isinstance(kernels_for(CUDA, torch.bfloat16), GpuKernels)
    assert isinstance(kernels_for(CUDA, torch.float32), GpuKernels)
    assert isinstance(kernels_for(CUDA, torch.float64), TorchKernels)


def test_those_of_torch_without_triton(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "workers.kernels.gpu.kernels", None)
    assert isinstance(kernels_for(CUDA, torch.bfloat16), TorchKernels)
    assert "Triton is not installed" in caplog.text
