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


class Fusing(CpuKernels):
    """Tells whether a step came of it."""

    has_fused = False

    def fuse(self, model: StepModel) -> FusedStep | None:
        step = super().fuse(model)
        self.has_fused = step is not None
        return step


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
@pytest.mark.parametrize("name", [entry.name for entry in checkpoints.FAMILIES if entry.name != "gpt2"])
def test_fused_equals_single_operators(name: str, kernels: str, family_folder: Callable[[str], Path]) -> None:
    folder, text = family_folder(name), checkpoints.prompt_ids(50)
    fusing = Fusing(build(kernels), torch.bfloat16)
    fused = model_with(folder, fusing)
    assert fusing.has_fused
    single = model_with(folder, OneByOne(build(kernels), torch.bfloat16))
    for chunk in (1, 7, None):
        assert torch.equal(logits_of(fused, text, chunk=chunk), logits_of(single, text, chunk=chunk))
    prompts = checkpoints.graded_prompts()
    assert fused.greedy(prompts, 20, chunk=7) == single.greedy(prompts, 20)


@pytest.mark.parametrize("kernels", PACKED[:1])
def test_layer_norms_and_learned_positions_are_not_fused(
    kernels: str, family_folder: Callable[[str], Path]
) -> None:
    fusing = Fusing(build(kernels), torch.bfloat16)
    model_with(family_folder("gpt2"), fusing)
    assert not fusing.has_fused
