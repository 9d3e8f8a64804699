"""What the system is told while files are read: what comes next, and what it need not keep.

All stays in its cache where memory suffices, else what was read last."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from workers.kernels import Quantization, kernels_for
from workers.model import tensor_files, weights
from workers.model.checkpoint import Checkpoint
from workers.model.loader import load_weights
from workers.model.parallel import TensorParallel
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


@pytest.mark.parametrize("rank", [0, 1])
def test_what_is_read_next_is_asked_for_before(
    rank: int, monkeypatch: pytest.MonkeyPatch, family_folder: Callable[[str], Path]
) -> None:
    """All matrices of the second layer, and nothing that the rank does not read."""
    asked: set[int] = set()
    late: list[int] = []
    read: set[int] = set()
    advise, read_into = os.posix_fadvise, os.preadv

    def watched_advice(descriptor: int, at: int, num_bytes: int, advice: int) -> None:
        if advice == os.POSIX_FADV_WILLNEED:
            asked.update(range(at, at + num_bytes))
        advise(descriptor, at, num_bytes, advice)

    def watched_read(descriptor: int, buffers: list[memoryview], at: int) -> int:
        count = read_into(descriptor, buffers, at)
        read.update(range(at, at + count))
        late.extend(at for at in range(at, at + count) if at not in asked)
        return count

    checkpoint = Checkpoint(family_folder("llama"))
    monkeypatch.setattr(os, "posix_fadvise", watched_advice)
    monkeypatch.setattr(os, "preadv", watched_read)
    kernels = kernels_for(CPU, torch.float32)
    load_weights(checkpoint, torch.float32, CPU, TensorParallel(rank, 2), kernels, Quantization.NONE)
    assert asked <= read
    of_layers = [
        entry for name, entry in checkpoint.entries.items() if len(entry.shape) == 2 and ".1." in name
    ]
    assert of_layers
    assert not [entry.name for entry in of_layers if set(range(entry.start, entry.stop)) & set(late)]
