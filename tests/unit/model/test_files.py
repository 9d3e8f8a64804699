"""File names and numbers of a hostile model folder: refused in words, never a traceback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from workers.model.config_fields import ConfigFields
from workers.model.errors import CheckpointError
from workers.model.files import INDEX_FILE, read_json, read_weight_headers


def test_a_link_to_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to(tmp_path / "config.json")
    with pytest.raises(CheckpointError, match=r"config\.json' cannot be found: .*oop"):
        read_json(tmp_path, "config.json")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a\0.safetensors", r"'a\\x00\.safetensors' cannot be found: embedded null byte"),
        ("\ud800.safetensors", r"'\\ud800\.safetensors' cannot be found: 'utf-8' codec"),
        ("x" * 300 + ".safetensors", r"names files that are not there: xxx"),
    ],
)
def test_a_name_in_the_index_that_no_file_can_have_is_refused(name: str, words: str, tmp_path: Path) -> None:
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"t": name}}))
    with pytest.raises(CheckpointError, match=words):
        read_weight_headers(tmp_path)


@pytest.mark.parametrize(
    "value",
    [10**400, -(10**400), float("inf"), float("nan"), True, "1"],
    ids=["large", "small", "infinite", "none", "flag", "text"],
)
def test_a_number_out_of_range_is_refused_whatever_its_size(value: object) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: factor must be a number"):
        ConfigFields({"factor": value}).number("factor", low=0.0, high=1e6)


def test_numbers_at_both_ends_are_taken() -> None:
    fields = ConfigFields({"low": 0, "high": 1e6})
    assert fields.number("low", low=0.0, high=1e6) == 0.0
    assert fields.number("high", low=0.0, high=1e6) == 1e6
