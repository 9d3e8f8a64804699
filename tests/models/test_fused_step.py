"""The decoder through one call a step against the same decoder, operator by operator, in bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.models import checkpoints
from tests.models.loading import logits_of
from tests.models.paging import PagedModel
from tests.unit.kernels.builds import PACKED, build
from workers.kernels import FusedStep, Kernels, StepModel
from workers.kernels.native import CpuKernels
from workers.model.checkpoint import Checkpoint
from workers.model.decoder import load_decoder
from workers.model.parallel import TensorParallel


class OneByOne(CpuKernels):
    """The C++ operators without the fused step."""

    def fuse(self, model: StepModel) -> FusedStep | None:
        return None


def model_with(folder: Path, kernels: Kernels) -> PagedModel:
    checkpoint = Checkpoint(folder)
    cpu = torch.device("cpu")
    decoder = load_decoder(checkpoint, torch.bfloat16, cpu, TensorParallel(), kernels)
    return PagedModel(decoder, dtype=torch.bfloat16)


@pytest.mark.parametrize("kernels", PACKED)
@pytest.mark.parametrize("name", [entry.name for entry in checkpoints.FAMILIES])
def test_fused_equals_single_operators(name: str, kernels: str, family_folder: Callable[[str], Path]) -> None:
    folder, text = family_folder(name), checkpoints.prompt_ids(50)
    fused = model_with(folder, CpuKernels(build(kernels), torch.bfloat16))
    single = model_with(folder, OneByOne(build(kernels), torch.bfloat16))
    for chunk in (1, 7, None):
        assert torch.equal(logits_of(fused, text, chunk=chunk), logits_of(single, text, chunk=chunk))
    prompts = checkpoints.graded_prompts()
    assert fused.greedy(prompts, 20, chunk=7) == single.greedy(prompts, 20)
