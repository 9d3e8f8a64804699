"""Every core family with weights of 8 and 4 bits, against transformers with these values in its matrices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.models import checkpoints
from tests.models.engine_groups import Client, group_config
from tests.models.families import CORE
from tests.models.loading import logits_of, paged_model
from tests.models.oracle import Oracle
from tests.models.ranks import Found, Work, run_ranks
from workers.config import ModelConfig
from workers.kernels import Quantization
from workers.kernels.quantized import quantize
from workers.model.checkpoint import Checkpoint
from workers.model.errors import CheckpointError
from workers.runtime.errors import RankConfigError
from workers.runtime.launch import LocalGroup
from workers.runtime.rank_model import RankModel

EVERY_FAMILY = [entry.name for entry in CORE]
WITH_EXPERTS = [*EVERY_FAMILY, "mixtral", "qwen3_moe"]  # whose choices bfloat16 may change
IN_BFLOAT16 = ["llama", "llama_biased", "qwen3", "gpt2"]
FORMS = [Quantization.INT8, Quantization.INT4]
PROMPTS, NUM_TOKENS = checkpoints.graded_prompts()[:3], 12
TEXT = checkpoints.prompt_ids(50)
Folders = Callable[[str], Path]


@torch.no_grad()
def quantized_oracle(folder: Path, form: Quantization, dtype: torch.dtype) -> Oracle:
    """transformers in float32 with the values that our linear layers compute with."""
    oracle = Oracle(folder)
    model = oracle.model
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.clone())  # no longer the embedding's, where it was tied
    for module in model.modules():
        kind = type(module).__name__
        if kind.endswith("Experts"):
            for expert in (*module.gate_up_proj, *module.down_proj):
                expert.copy_(quantize(expert.to(dtype), form).values())
        if kind not in ("Linear", "Conv1D"):
            continue
        weight = module.weight.T if kind == "Conv1D" else module.weight  # (out, in)
        values = quantize(weight.to(dtype), form.of_head if module is head else form).values()
        module.weight.copy_(values.T if kind == "Conv1D" else values)
    return oracle


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_float32_equals_transformers_with_the_same_values(
    name: str, form: Quantization, family_folder: Folders
) -> None:
    folder = family_folder(name)
    model = paged_model(folder, quantization=form)
    wanted = quantized_oracle(folder, form, torch.float32).logits(TEXT)
    torch.testing.assert_close(logits_of(model, TEXT, chunk=7), wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("name", EVERY_FAMILY)
def test_bfloat16_stays_close_however_chunked(name: str, form: Quantization, family_folder: Folders) -> None:
    """Logits of spread 1; unquantized bfloat16 is off by 0.02 in the mean, inputs of 8 bits add a little."""
    folder = family_folder(name)
    model = paged_model(folder, dtype=torch.bfloat16, quantization=form)
    found = logits_of(model, TEXT)
    error = (found - quantized_oracle(folder, form, torch.bfloat16).logits(TEXT)).abs()
    assert float(error.mean()) < 0.03 and float(error.max()) < 0.25
    for chunk in (1, 7):
        assert torch.equal(logits_of(model, TEXT, chunk=chunk), found)


@pytest.fixture(scope="module")
def two_ranks(
    family_folder: Folders, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, Quantization, str], Found]:
    keys = [
        *((name, form, "float32") for name in WITH_EXPERTS for form in FORMS),
        *((name, form, "bfloat16") for name in IN_BFLOAT16 for form in FORMS),
    ]
    works = [
        Work(
            folder=str(family_folder(name)),
            texts=[TEXT],
            prompts=PROMPTS if dtype == "bfloat16" else [],
            num_tokens=NUM_TOKENS,
            chunk=16,
            dtype=dtype,
            quantization=form.value,
        )
        for name, form, dtype in keys
    ]
    return dict(zip(keys, run_ranks(tmp_path_factory.mktemp("two"), 2, works), strict=True))


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_two_ranks_equal_transformers_with_the_same_values(
    name: str,
    form: Quantization,
    family_folder: Folders,
    two_ranks: dict[tuple[str, Quantization, str], Found],
) -> None:
    wanted = quantized_oracle(family_folder(name), form, torch.float32).logits(TEXT)
    found = two_ranks[name, form, "float32"].logits[0]
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("name", IN_BFLOAT16)
def test_two_ranks_have_the_bits_of_one(
    name: str,
    form: Quantization,
    family_folder: Folders,
    two_ranks: dict[tuple[str, Quantization, str], Found],
) -> None:
    model = paged_model(family_folder(name), dtype=torch.bfloat16, quantization=form)
    found = two_ranks[name, form, "bfloat16"]
    assert torch.equal(found.logits[0], logits_of(model, TEXT))
    assert found.ids == model.greedy(PROMPTS, NUM_TOKENS)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_engine_says_what_the_decoder_says(form: Quantization, family_folder: Folders) -> None:
    folder, prompts = family_folder("llama"), checkpoints.graded_prompts()
    config = group_config(folder, 1)
    config = replace(config, model=ModelConfig(path=str(folder), dtype="bfloat16", quantization=form.value))
    model = paged_model(folder, dtype=torch.bfloat16, quantization=form)
    wanted = [model.greedy([prompt], 20)[0] for prompt in prompts]
    with LocalGroup(config) as group:
        client = Client(group.facts, group.executor)
        assert [answer.token_ids for answer in client.generate(prompts, together=False)] == wanted
        assert [answer.token_ids for answer in client.generate(prompts)] == wanted


def test_each_form_has_a_hash_of_its_own_and_ranks_compare_it(family_folder: Folders) -> None:
    def model(quantization: str) -> RankModel:
        config = group_config(family_folder("llama"), 1)
        return RankModel(replace(config, model=replace(config.model, quantization=quantization)), 0)

    models = [model(name) for name in ("none", "int8", "int4")]
    hashes = [each.facts(16).model_hash for each in models]
    assert hashes[0] == Checkpoint(family_folder("llama")).model_hash() and len(set(hashes)) == 3
    assert [each.identity(same_files=True)["quantization"] for each in models] == ["none", "int8", "int4"]
    with pytest.raises(
        RankConfigError, match=r"model\.quantization 'int2': must be one of none, int8, int4, auto"
    ):
        model("int2")


def test_weights_out_of_range_are_named(tmp_path: Path) -> None:
    oracle = Oracle(checkpoints.build(tmp_path / "m", checkpoints.family("llama")))
    with torch.no_grad():
        oracle.model.model.layers[1].mlp.down_proj.weight[3, 5] = -1e6
    folder = checkpoints.save(tmp_path / "large", oracle.model)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.down_proj: weights from -1e\+06 .* use int8"):
        paged_model(folder, quantization=Quantization.INT4)
    assert bool(logits_of(paged_model(folder, quantization=Quantization.INT8), TEXT).isfinite().all())
