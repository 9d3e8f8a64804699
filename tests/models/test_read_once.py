"""What of the files stays in the system's cache: all where memory suffices, else what was read last."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from workers.model import tensor_files, weights
from workers.model.checkpoint import Checkpoint
from workers.model.weights import WeightReader

BEHIND_BYTES = 20_000
CPU = torch.device("cpu")


class Reading(NamedTuple):
    """Bytes of files."""

    all: int
    let_go: list[range]


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch, family_folder: Callable[[str], Path]) -> Callable[[float], Reading]:
    """Reads all matrices of a checkpoint on a machine with memory for so many of it."""
    let_go: list[range] = []
    advise = os.posix_fadvise

    def watched(descriptor: int, at: int, num_bytes: int, advice: int) -> None:
        if advice == os.POSIX_FADV_DONTNEED:
            let_go.append(range(at, at + num_bytes))
        advise(descriptor, at, num_bytes, advice)

    monkeypatch.setattr(os, "posix_fadvise", watched)
    monkeypatch.setattr(tensor_files, "_BEHIND_BYTES", BEHIND_BYTES)

    def all_matrices(times: float) -> Reading:
        checkpoint = Checkpoint(family_folder("llama"))
        memory = round(times * checkpoint.weight_bytes)
        monkeypatch.setattr(weights, "available_host_bytes", lambda: memory)
        names = [name for name, entry in checkpoint.entries.items() if len(entry.shape) == 2]
        with WeightReader(checkpoint, torch.float32, CPU) as reader:
            for name in names:
                reader.matrix(name)
        entries = [checkpoint.entries[name] for name in names]
        return Reading(sum(entry.stop - entry.start for entry in entries), let_go)

    return all_matrices


def test_files_stay_where_memory_suffices_for_them_and_what_is_made_of_them(
    read: Callable[[float], Reading],
) -> None:
    assert read(2.0).let_go == []


def test_files_leave_behind_what_was_read_last_where_memory_is_short(
    read: Callable[[float], Reading],
) -> None:
    reading = read(1.9)
    num_left = sum(map(len, reading.let_go))
    assert reading.all > 3 * BEHIND_BYTES
    assert reading.all - BEHIND_BYTES <= num_left < reading.all
    assert len({byte for span in reading.let_go for byte in span}) == num_left, "each once"
