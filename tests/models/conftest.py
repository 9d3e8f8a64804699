"""One thread, and every family's checkpoint built once a session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers.utils import logging as transformers_logging

from tests.models import checkpoints


@pytest.fixture(scope="session", autouse=True)
def _quiet_single_thread() -> None:
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()


@pytest.fixture(scope="session")
def family_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a family's screened checkpoint, by name."""
    root = tmp_path_factory.mktemp("families")

    def folder(name: str) -> Path:
        place = root / name
        if not place.exists():
            checkpoints.build(place, checkpoints.family(name))
        return place

    return folder
