"""The file of texts: read again, gone on with, refused."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from workers.training.prompts import Part, TextError
from workers.training.writing import Header, Text, _drop_cut_line, read_texts

HEADER = Header(target_hash="ab", seed=1, count=10, asked=0, max_tokens=8)
LINES = [
    {"number": 1, "part": "held_out", "prompt_ids": [5], "answer_ids": [6, 7]},
    {"number": 0, "part": "training", "prompt_ids": [3], "answer_ids": [4]},
]
TEXTS = [
    Text(number=0, part=Part.TRAINING, prompt_ids=(3,), answer_ids=(4,)),
    Text(number=1, part=Part.HELD_OUT, prompt_ids=(5,), answer_ids=(6, 7)),
]


def _write(file: Path, cut: str = "") -> Path:
    file.write_text("".join(json.dumps(line) + "\n" for line in (asdict(HEADER), *LINES)) + cut)
    return file


def test_texts_are_read_by_number(tmp_path: Path) -> None:
    assert read_texts(_write(tmp_path / "text.jsonl"), HEADER) == TEXTS
    assert read_texts(tmp_path / "none.jsonl", HEADER) == []


def test_a_line_that_was_cut_is_written_again(tmp_path: Path) -> None:
    file = _write(tmp_path / "text.jsonl", cut='{"number": 2, "par')
    assert read_texts(file, HEADER) == TEXTS
    _drop_cut_line(file)
    assert file.read_bytes() == _write(tmp_path / "whole.jsonl").read_bytes()


@pytest.mark.parametrize("content", ["", '{"target_ha'])
def test_a_file_that_was_only_just_begun_is_begun_again(tmp_path: Path, content: str) -> None:
    file = tmp_path / "text.jsonl"
    file.write_text(content)
    assert read_texts(file, HEADER) == []
    _drop_cut_line(file)
    assert file.read_bytes() == b""


def test_texts_of_another_model_are_refused(tmp_path: Path) -> None:
    file = _write(tmp_path / "text.jsonl")
    with pytest.raises(TextError, match=r"text\.jsonl begins with .*delete it first"):
        read_texts(file, replace(HEADER, target_hash="cd"))
    file.write_text("one line of somebody else's")
    with pytest.raises(TextError, match=r"begins with .one line of.*delete it first"):
        read_texts(file, HEADER)
