"""Experts that a file holds in one tensor, as transformers has them in memory: the weights of single ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models import checkpoints
from tests.models.loading import logits_of, paged_model
from tests.models.oracle import Oracle
from tests.models.ranks import Work, run_ranks
from workers.kernels import Quantization
from workers.model.checkpoint import Checkpoint
from workers.model.errors import CheckpointError
from workers.model.files import SINGLE_FILE
from workers.quantizing.folder import quantize_folder

NAMES = ["mixtral", "qwen3_moe"]
TEXT = checkpoints.prompt_ids(40)
Folders = Callable[[str], Path]


@pytest.fixture(scope="module")
def joined(family_folder: Folders, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """A family's checkpoint, written without going back to the names that it came with."""
    root = tmp_path_factory.mktemp("joined")

    def of(name: str) -> Path:
        if not (root / name).exists():
            Oracle(family_folder(name)).model.save_pretrained(root / name, save_original_format=False)
        return root / name

    return of


@pytest.mark.parametrize("name", NAMES)
def test_both_layouts_have_the_same_bits(name: str, family_folder: Folders, joined: Folders) -> None:
    stored = load_file(joined(name) / SINGLE_FILE)
    assert stored["model.layers.0.mlp.experts.gate_up_proj"].dim() == 3
    single, whole = Checkpoint(family_folder(name)), Checkpoint(joined(name))
    assert whole.tensors.keys() == single.tensors.keys()
    assert whole.model_hash() != single.model_hash()
    wanted = logits_of(paged_model(family_folder(name)), TEXT)
    assert torch.equal(logits_of(paged_model(joined(name)), TEXT), wanted)


def test_two_ranks_read_their_own(joined: Folders, tmp_path: Path) -> None:
    works = [Work(folder=str(joined(name)), texts=[TEXT]) for name in NAMES]
    for name, found in zip(NAMES, run_ranks(tmp_path, 2, works), strict=True):
        assert torch.equal(found.logits[0], logits_of(paged_model(joined(name)), TEXT))


def test_a_quantized_folder_has_single_matrices(joined: Folders, tmp_path: Path) -> None:
    out = tmp_path / "out"
    quantize_folder(Checkpoint(joined("mixtral")), Quantization.INT4, out, lambda text: None)
    assert "model.layers.1.block_sparse_moe.experts.4.w2.codes" in Checkpoint(out).tensors
    wanted = logits_of(paged_model(joined("mixtral"), quantization=Quantization.INT4), TEXT)
    found = logits_of(paged_model(out, quantization=Quantization.AUTO), TEXT)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda whole: whole[:4].clone(), r"missing model\.layers\.0\.mlp\.experts\.4\.gate_proj\.weight"),
        (lambda whole: whole[:, :87].clone(), r"not part of this model: .*experts\.gate_up_proj"),
        (
            lambda whole: whole.transpose(1, 2).contiguous(),
            r"has shape \[32, 88\], the config needs \[44, 64\]",
        ),
    ],
    ids=["too few", "half a row", "inputs first"],
)
def test_what_does_not_fit_is_told(
    edit: Callable[[torch.Tensor], torch.Tensor], said: str, joined: Folders, tmp_path: Path
) -> None:
    folder = tmp_path / "damaged"
    folder.mkdir()
    (folder / "config.json").write_bytes((joined("qwen3_moe") / "config.json").read_bytes())
    tensors = load_file(joined("qwen3_moe") / SINGLE_FILE)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    save_file({**tensors, name: edit(tensors[name])}, folder / SINGLE_FILE, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=said):
        Checkpoint(folder)
