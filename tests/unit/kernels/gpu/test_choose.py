"""Which kernels a CUDA device gets."""

from __future__ import annotations

import sys

import pytest
import torch

from tests.unit.kernels.flashinfer_double import Calls, wrapper_of
from tests.unit.kernels.gpu.support import REFERENCE, assert_close, batch_on_device, noise, pool_on_device
from workers.kernels import TorchKernels, kernels_for
from workers.kernels.gpu import flash_attention
from workers.kernels.gpu.flash_attention import FlashAttention
from workers.kernels.gpu.interpreter import DEVICE
from workers.kernels.gpu.kernels import GpuKernels

CUDA = torch.device("cuda")
MIXED = [(12, 1), (3, 6), (0, 1)]


def test_those_in_triton() -> None:
    assert isinstance(kernels_for(CUDA, torch.bfloat16), GpuKernels)
    assert isinstance(kernels_for(CUDA, torch.float32), GpuKernels)
    assert isinstance(kernels_for(CUDA, torch.float64), TorchKernels)


@pytest.mark.parametrize("wants", [True, False])
def test_prompts_by_flashinfer_where_that_is_asked_for(wants: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls()
    flash = FlashAttention(wrapper_of(calls), "fa3", DEVICE)
    monkeypatch.setattr(flash_attention, "load_flash_attention", lambda device: flash)
    kernels = kernels_for(CUDA, torch.bfloat16, flashinfer=wants)
    cache, batch = pool_on_device(20, 1, 8, 64, torch.bfloat16).layers[0], batch_on_device(MIXED, 8, 20)
    q = noise(8, 2, 64, dtype=torch.bfloat16)
    found = kernels.paged_attention(q, cache, batch, 0.2, 16, 4.0)
    assert_close(found, REFERENCE.paged_attention(q, cache, batch, 0.2, 16, 4.0))
    assert calls.num_runs == wants


def test_those_of_torch_without_triton(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "workers.kernels.gpu.kernels", None)
    assert isinstance(kernels_for(CUDA, torch.bfloat16), TorchKernels)
    assert "Triton is not installed" in caplog.text
