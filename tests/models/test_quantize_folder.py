"""A folder quantized ahead of time: the values of a start that quantizes, whole or not there at all."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.cli.model import describe
from tests.models import checkpoints
from tests.models.loading import logits_of, paged_model
from tests.models.oracle import Oracle
from tests.models.quantized_checkpoints import form as checkpoint_form
from tests.models.quantized_checkpoints import make
from tests.models.ranks import Work, run_ranks
from workers.kernels import Quantization
from workers.model.checkpoint import Checkpoint
from workers.model.errors import CheckpointError
from workers.model.files import INDEX_FILE, SINGLE_FILE
from workers.model.weights import WeightReader
from workers.quantizing.folder import quantize_folder
from workers.quantizing.quality import PASSAGE

FORMS = [Quantization.INT8, Quantization.INT4]
DTYPES = ["float32", "bfloat16"]
TEXT = checkpoints.prompt_ids(40)
CPU = torch.device("cpu")
Folders = Callable[[str], Path]


def silent(text: str) -> None:
    """Progress that nobody reads."""


def quantized(source: Path, form: Quantization, out: Path) -> Path:
    quantize_folder(Checkpoint(source), form, out, silent)
    return out


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("name", ["llama", "llama_tied", "llama_biased", "qwen3", "gpt2", "qwen3_moe"])
def test_values_are_those_of_a_start_that_quantizes(
    name: str, form: Quantization, family_folder: Folders, tmp_path: Path
) -> None:
    source = family_folder(name)
    out = quantized(source, form, tmp_path / "out")
    made = Checkpoint(out)
    assert made.kept == (form, Quantization.INT8) and not made.is_tied
    wanted = logits_of(paged_model(source, quantization=form), TEXT)
    found = logits_of(paged_model(out, quantization=Quantization.AUTO), TEXT)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("name", ["llama", "llama_tied", "gpt2", "qwen3_moe"])
def test_few_bits_are_as_many_parameters(
    name: str, form: Quantization, family_folder: Folders, tmp_path: Path
) -> None:
    """Codes that share a byte, scales, and a tied head's own copy change nothing of what a model has."""
    source = family_folder(name)
    wanted = Oracle(source).model.num_parameters()
    assert describe(Checkpoint(source))["parameters"] == wanted
    assert describe(Checkpoint(quantized(source, form, tmp_path / "out")))["parameters"] == wanted


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_head_that_the_files_call_otherwise_is_written(
    form: Quantization, family_folder: Folders, tmp_path: Path
) -> None:
    """GPT-NeoX as transformers 5 saves it."""
    source = Path(shutil.copytree(family_folder("gpt_neox"), tmp_path / "source"))
    tensors = load_file(source / SINGLE_FILE)
    head = next(name for name in ("lm_head.weight", "embed_out.weight") if name in tensors)
    tensors["lm_head.weight"] = tensors.pop(head)
    save_file(tensors, source / SINGLE_FILE, metadata={"format": "pt"})
    out = quantized(source, form, tmp_path / "out")
    assert "embed_out.codes" in Checkpoint(out).tensors
    wanted = logits_of(paged_model(source, quantization=form), TEXT)
    found = logits_of(paged_model(out, quantization=Quantization.AUTO), TEXT)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_bfloat16_has_the_very_codes(form: Quantization, family_folder: Folders, tmp_path: Path) -> None:
    model = Oracle(family_folder("llama_tied")).model.to(torch.bfloat16)
    source = checkpoints.save(tmp_path / "half", model)
    out = quantized(source, form, tmp_path / "out")
    wanted = logits_of(paged_model(source, dtype=torch.bfloat16, quantization=form), TEXT)
    model = paged_model(out, dtype=torch.bfloat16, quantization=Quantization.AUTO)
    assert torch.equal(logits_of(model, TEXT), wanted)


def test_two_ranks_say_what_one_says(family_folder: Folders, tmp_path: Path) -> None:
    """Inner size 96: the second rank begins inside a group of 32 inputs."""
    works = []
    for form in FORMS:
        out = quantized(family_folder("llama"), form, tmp_path / form.value)
        works += [Work(folder=str(out), texts=[TEXT], quantization="auto", dtype=dtype) for dtype in DTYPES]
    for work, found in zip(works, run_ranks(tmp_path, 2, works), strict=True):
        dtype = getattr(torch, work.dtype)
        model = paged_model(Path(work.folder), dtype=dtype, quantization=Quantization.AUTO)
        assert torch.equal(found.logits[0], logits_of(model, TEXT)), work


def test_shards_stay_shards_and_small_files_come_along(family_folder: Folders, tmp_path: Path) -> None:
    model = Oracle(family_folder("llama")).model
    source = checkpoints.save(tmp_path / "source", model, max_shard_size="40KB")
    (source / "tokenizer.json").write_text("{}")
    (source / "pytorch_model.bin").write_bytes(b"not copied")
    num_files = len(list(source.glob("*.safetensors")))
    out = quantized(source, Quantization.INT8, tmp_path / "out")
    assert num_files > 3 and len(list(out.glob("*.safetensors"))) == num_files
    assert set(json.loads((out / INDEX_FILE).read_text())["weight_map"]) == set(Checkpoint(out).tensors)
    assert (out / "tokenizer.json").read_text() == "{}" and not (out / "pytorch_model.bin").exists()
    assert Checkpoint(out).weight_bytes < 0.5 * Checkpoint(source).weight_bytes


def test_codes_of_gptq_come_over_as_they_are(family_folder: Folders, tmp_path: Path) -> None:
    source = make(tmp_path, family_folder("llama"), checkpoint_form("gptq")).folder
    out = quantized(source, Quantization.INT4, tmp_path / "out")
    name = "model.layers.1.mlp.up_proj.weight"
    found = []
    for folder in (source, out):
        with WeightReader(Checkpoint(folder), torch.bfloat16, CPU) as reader:
            kept = reader.kept(name)
            assert kept is not None and kept.minima is not None
            found.append((kept.codes, kept.scales, kept.minima))
    assert all(torch.equal(first, second) for first, second in zip(*found, strict=True))
    with pytest.raises(CheckpointError, match="is quantized already"):
        quantized(out, Quantization.INT8, tmp_path / "again")


def test_an_embedding_in_few_bits_is_refused(
    family_folder: Folders, tmp_path: Path, no_leftovers: Path
) -> None:
    source = make(tmp_path, family_folder("llama"), checkpoint_form("fp8")).folder
    tensors = load_file(source / SINGLE_FILE)
    name = "model.embed_tokens.weight"
    tensors |= {name: tensors[name].to(torch.float8_e4m3fn), f"{name}_scale": torch.ones(())}
    save_file(tensors, source / SINGLE_FILE, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"{name} is stored in few bits, which cannot be written"):
        quantized(source, Quantization.INT8, no_leftovers / "out")


def test_a_router_in_few_bits_is_refused(family_folder: Folders, tmp_path: Path, no_leftovers: Path) -> None:
    source = make(tmp_path, family_folder("mixtral"), checkpoint_form("fp8")).folder
    name = r"model\.layers\.0\.block_sparse_moe\.gate\.weight"
    with pytest.raises(CheckpointError, match=f"{name} is stored in few bits, which cannot be written"):
        quantized(source, Quantization.INT8, no_leftovers / "out")


def test_errors_say_how_far_each_matrix_is_off(family_folder: Folders, tmp_path: Path) -> None:
    errors = quantize_folder(Checkpoint(family_folder("llama")), Quantization.INT4, tmp_path / "out", silent)
    assert len(errors) == 2 * 7 + 1
    by_name = {error.name: error.relative for error in errors}
    assert by_name["lm_head.weight"] < 0.01  # 8 bits
    layers = [error for name, error in by_name.items() if name != "lm_head.weight"]
    assert (
        0.05 < min(layers) <= max(layers) < 0.12
    )  # a step is 4 deviations / 15, its error a step / sqrt(12)


@pytest.fixture
def no_leftovers(tmp_path: Path) -> Iterator[Path]:
    """A folder in which a failed attempt must leave nothing."""
    home = tmp_path / "home"
    home.mkdir()
    yield home
    assert list(home.iterdir()) == []


def test_a_weight_that_is_not_finite_leaves_no_folder(
    family_folder: Folders, tmp_path: Path, no_leftovers: Path
) -> None:
    source = checkpoints.build(tmp_path / "m", checkpoints.family("llama"))
    tensors = load_file(source / SINGLE_FILE)
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name][3, 5] = float("nan")
    save_file(tensors, source / SINGLE_FILE, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"tensor {name} holds NaN"):
        quantized(source, Quantization.INT8, no_leftovers / "out")


def test_a_full_disk_leaves_no_folder(family_folder: Folders, no_leftovers: Path) -> None:
    """The system refuses to make a file longer than the limit, as it does when there is no room."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, old[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            quantized(family_folder("llama"), Quantization.INT8, no_leftovers / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


def test_only_a_new_or_an_empty_folder_is_written(family_folder: Folders, tmp_path: Path) -> None:
    source = family_folder("llama")
    empty, full = tmp_path / "empty", tmp_path / "full"
    empty.mkdir()
    full.mkdir()
    (full / "mine").write_text("kept")
    assert Checkpoint(quantized(source, Quantization.INT8, empty)).kept == (
        Quantization.INT8,
        Quantization.INT8,
    )
    with pytest.raises(FileExistsError, match="full exists and is not an empty folder"):
        quantized(source, Quantization.INT8, full)
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        quantized(source, Quantization.INT8, tmp_path / "absent" / "out")
    assert (full / "mine").read_text() == "kept" and sorted(tmp_path.glob(".*")) == []


def test_the_text_is_the_one_that_figures_were_taken_with() -> None:
    assert len(PASSAGE.read_text(encoding="utf-8").split()) == 1297
