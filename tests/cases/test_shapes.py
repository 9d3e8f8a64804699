"""Shapes that do not divide and folders with damaged weights, seen from outside."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases.conftest import Tiny
from tests.cases.serving import COMPLETIONS, serving
from tests.models.checkpoints import build, family, prompt_ids
from tests.models.toy_tokenizers import byte_tokenizer
from workers.model.errors import CheckpointError


@pytest.mark.parametrize(
    "shape",
    [
        {"num_key_value_heads": 1},
        {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8},
    ],
    ids=["one KV head", "9 heads, 3 KV heads"],
)
def test_two_ranks_say_what_one_says(tmp_path: Path, shape: dict[str, int]) -> None:
    """With an odd vocabulary as well."""
    folder = build(tmp_path, family("llama"), vocab_size=259, **shape)
    byte_tokenizer().save_pretrained(folder)
    bodies = [
        {"prompt": prompt_ids(length, 259, seed=length), "max_tokens": 20, "temperature": 0.8, "seed": 3}
        for length in (1, 16, 40)
    ]
    with serving(folder) as one:
        alone = [one.ids(body) for body in bodies]
    with serving(folder, tensor_parallel=2) as two:
        assert [two.ids(body) for body in bodies] == alone
        two.idle()
    assert all(0 <= id < 259 for ids in alone for id in ids)


def test_damaged_folders_do_not_start(tmp_path: Path) -> None:
    folder = build(tmp_path, family("llama"), vocab_size=259)
    byte_tokenizer().save_pretrained(folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        serving(folder).__enter__()
    weights.unlink()
    with pytest.raises(CheckpointError, match="safetensors"):
        serving(folder).__enter__()


def test_intact_folder_starts(tiny: Tiny) -> None:
    with serving(tiny.folder) as server:
        assert server.whole(COMPLETIONS, {"prompt": "hi", "max_tokens": 2})["usage"]["completion_tokens"] == 2
