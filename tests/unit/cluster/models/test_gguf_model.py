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

from cluster.models.gguf_folder import convert_file
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


@pytest.mark.parametrize(
    ("architecture", "pre", "kind"),
    [
        ("qwen2", "qwen2", None),
        ("qwen3", "llama-bpe", None),
        *(
            ("llama", "smollm", gguf.GGMLQuantizationType[name])
            for name in ("Q8_0", "Q4_0", "Q4_1", "F16", "BF16")
        ),
    ],
)
def test_other_architectures_and_kinds_of_tensors(
    architecture: str, pre: str, kind: gguf.GGMLQuantizationType | None, tmp_path: Path
) -> None:
    weights = write_tiny_gguf(tmp_path / "m.gguf", architecture=architecture, pre=pre, kind=kind)
    convert_file(tmp_path / "m.gguf", tmp_path / "out", lambda text: None)
    checkpoint = Checkpoint(tmp_path / "out")
    assert checkpoint.config["model_type"] == architecture
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: values.tolist() for name, values in found.items()} == {
        name: torch.from_numpy(values).to(torch.bfloat16).tolist() for name, values in weights.items()
    }
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode("hi 20, hi").ids) == "hi 20, hi"


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_super_blocks_are_those_of_the_gguf_package(kind: str) -> None:
    """The package cannot write them, so any bytes are blocks here: what counts is that they are read."""
    form = gguf.GGMLQuantizationType[kind]
    _, size = gguf.GGML_QUANT_SIZES[form]
    data = np.random.default_rng(3).integers(0, 64, (2, size), dtype=np.uint8)
    assert gguf.quants.dequantize(data, form).shape == (2, 256)


def test_a_file_that_is_damaged_or_in_the_way(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    write_tiny_gguf(file)
    content = file.read_bytes()
    for damaged in (b"", b"GGUF", content[:500], b"\xff" * 2000, content[: len(content) // 2]):
        file.write_bytes(damaged)
        with pytest.raises(GgufError, match=r"m\.gguf (is damaged or no GGUF file|cannot be converted)"):
            convert_file(file, tmp_path / "out", lambda text: None)
    with pytest.raises(FileExistsError, match="is not an empty folder"):
        convert_file(file, tmp_path, lambda text: None)
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.gguf"]


def test_bfloat16_rounds_as_torch_does() -> None:
    values = np.random.default_rng(1).standard_normal(10_000).astype(np.float32)
    ties = np.array([0x3F808000, 0x3F818000, 0x00000000, 0x80000000, 0xBF808000], dtype=np.uint32)
    values = np.concatenate([values, ties.view(np.float32)])
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(to_bfloat16(values), expected)


def test_other_architectures_are_refused_by_name(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "other.gguf", architecture="falcon")
    with pytest.raises(GgufError, match=r"general\.architecture is 'falcon'; covered: llama, qwen2, qwen3"):
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
