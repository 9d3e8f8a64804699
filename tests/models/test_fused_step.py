"""The decoder through one call a step against the same decoder, operator by operator, in bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.models import checkpoints
from tests.models.families import CORE, FAMILIES
from tests.models.loading import logits_of
from tests.models.paging import PagedModel
from tests.models.quantized_checkpoints import form, make
from tests.unit.kernels.builds import PACKED, build
from workers.kernels import FusedStep, Kernels, Quantization, StepModel
from workers.kernels.native import CpuKernels
from workers.model.checkpoint import Checkpoint
from workers.model.decoder import load_decoder
from workers.model.parallel import TensorParallel

FUSED = [*(entry.name for entry in CORE if entry.name != "gpt2"), "phi3_longrope"]
# A fused step would leave out what these have beyond Llama; "phi3" has an odd number of inner columns.
NOT_FUSED = [entry.name for entry in FAMILIES if entry.name not in FUSED]


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


def model_with(folder: Path, kernels: Kernels, quantization: Quantization = Quantization.NONE) -> PagedModel:
    checkpoint = Checkpoint(folder)
    cpu = torch.device("cpu")
    decoder = load_decoder(checkpoint, torch.bfloat16, cpu, TensorParallel(), kernels, quantization)
    return PagedModel(decoder, dtype=torch.bfloat16)


@pytest.mark.parametrize("kernels", PACKED)
@pytest.mark.parametrize("name", FUSED)
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


@pytest.mark.parametrize("kernels", PACKED)
@pytest.mark.parametrize("left_out", ["model.layers.0.", "model.layers.0.mlp.down_proj", "model.layers.1."])
def test_layers_of_several_formats(
    left_out: str, kernels: str, family_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """More rows than threads: these are prepared in a buffer that all layers share."""
    folder = make(tmp_path, family_folder("llama"), form("gptq"), left_out=left_out).folder
    fusing = Fusing(build(kernels), torch.bfloat16)
    fused = model_with(folder, fusing, Quantization.AUTO)
    assert fusing.has_fused
    single = model_with(folder, OneByOne(build(kernels), torch.bfloat16), Quantization.AUTO)
    text = checkpoints.prompt_ids(50)
    assert torch.equal(logits_of(fused, text), logits_of(single, text))


@pytest.mark.parametrize("kernels", PACKED[:1])
@pytest.mark.parametrize("name", NOT_FUSED)
def test_what_the_fused_step_does_not_know_is_not_fused(
    name: str, kernels: str, family_folder: Callable[[str], Path]
) -> None:
    fusing = Fusing(build(kernels), torch.bfloat16)
    model_with(family_folder(name), fusing)
    assert not fusing.has_fused
