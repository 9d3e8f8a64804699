"""The file of states: read again, or of no use."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.unit.training.material_maker import make_material
from workers.training.states import _digest, _stored

TEXTS = make_material().texts


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "states.safetensors"
    save_file({"states": torch.ones(3, 2)}, path, metadata={"texts_sha256": _digest(TEXTS)})
    return path


def test_states_are_read_for_their_own_texts_only(file: Path) -> None:
    found = _stored(file, _digest(TEXTS))
    assert found is not None and torch.equal(found, torch.ones(3, 2))
    assert _stored(file, _digest(TEXTS[:-1])) is None
    assert _stored(file.with_name("none"), _digest(TEXTS)) is None


@pytest.mark.parametrize("size", [0, 5, 100, -1])
def test_a_file_whose_writing_was_interrupted_is_made_again(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])
    assert _stored(file, _digest(TEXTS)) is None
