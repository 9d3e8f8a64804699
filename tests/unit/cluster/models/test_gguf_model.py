"""A GGUF file becomes a folder in Hugging Face layout with the very same weights."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from cluster.models.gguf_model import GgufError, read_model, to_bfloat16, write_folder
from tests.unit.cluster.tiny_gguf import SPECIAL, TEMPLATE, tokens, write_tiny_gguf
from workers.model.checkpoint import Checkpoint


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    """A converted folder and the weights that should be in it."""
    root = tmp_path_factory.mktemp("gguf")
    weights = write_tiny_gguf(root / "tiny.gguf")
    folder = root / "folder"
    folder.mkdir()
    write_folder(root / "tiny.gguf", folder, lambda text: None)
    return folder, weights


def test_every_weight_is_the_dequantised_one_in_bfloat16(
    converted: tuple[Path, dict[str, np.ndarray]],
) -> None:
    folder, weights = converted
    found = load_file(folder / "model.safetensors")
    assert sorted(found) == sorted(weights)
    different = [
        name
        for name, values in weights.items()
        if not torch.equal(found[name], torch.from_numpy(values).to(torch.bfloat16))
    ]
    assert different == []


def test_the_engine_opens_the_folder(converted: tuple[Path, dict[str, np.ndarray]]) -> None:
    checkpoint = Checkpoint(converted[0])
    spec = checkpoint.spec
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (2, 4, 2, 16)
    assert (checkpoint.max_model_len, checkpoint.eos_token_ids, checkpoint.is_tied) == (128, (2,), True)
    assert spec.norm_eps == 1e-5  # stored as float32, which is not 1e-5
    config = json.loads((converted[0] / "config.json").read_text())
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 50000.0}


def test_the_tokenizer_splits_digits_and_keeps_special_tokens_whole(
    converted: tuple[Path, dict[str, np.ndarray]],
) -> None:
    folder, _ = converted
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "<|im_start|>hi hi 20<|im_end|>"
    assert tokenizer.encode(text).tokens == [SPECIAL[1], "hi", "\u0120hi", "\u0120", "2", "0", SPECIAL[2]]
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert tokenizer.decode(tokenizer.encode(text).ids) == "hi hi 20"
    assert (folder / "chat_template.jinja").read_text() == TEMPLATE
    names = json.loads((folder / "tokenizer_config.json").read_text())
    assert (names["bos_token"], names["eos_token"], names["unk_token"]) == (
        SPECIAL[1],
        SPECIAL[2],
        SPECIAL[0],
    )
    assert json.loads((folder / "generation_config.json").read_text()) == {
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }


def test_bfloat16_rounds_as_torch_does() -> None:
    values = np.random.default_rng(1).standard_normal(10_000).astype(np.float32)
    ties = np.array([0x3F808000, 0x3F818000, 0x00000000, 0x80000000, 0xBF808000], dtype=np.uint32)
    values = np.concatenate([values, ties.view(np.float32)])
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(to_bfloat16(values), expected)


def test_other_architectures_are_refused_by_name(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "other.gguf", architecture="qwen3")
    with pytest.raises(GgufError, match=r"general\.architecture is 'qwen3'; covered: llama"):
        read_model(gguf.GGUFReader(tmp_path / "other.gguf"))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_full_disk_is_an_error_of_the_disk(tmp_path: Path, name: str) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / name).symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device"):
        write_folder(tmp_path / "tiny.gguf", folder, lambda text: None)


def test_the_vocabulary_of_the_test_file_is_what_the_tests_think() -> None:
    vocab, merges = tokens()
    assert len(vocab) == len(set(vocab)) == 100
    assert len(merges) == 2
