"""Which GPU a rank computes on, and how many cores it may count on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from workers.runtime.device import make_current, usable_cores

ALL = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, ALL),
        ({"cpu.max": "max 100000\n"}, ALL),
        ({"cpu.max": "150000 100000\n"}, 1),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "1000000000 100000\n"}, ALL),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, ALL),
        ({"cpu/cpu.cfs_quota_us": "100000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1),
    ],
)
def test_cores_of_affinity_and_container(tmp_path: Path, files: dict[str, str], cores: int) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert usable_cores(tmp_path) == cores


def test_the_affinity_mask_is_honoured(tmp_path: Path) -> None:
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert usable_cores(tmp_path) == 1
    finally:
        os.sched_setaffinity(0, allowed)


def test_a_rank_makes_its_own_gpu_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", made.append)
    make_current(torch.device("cpu"))
    make_current(torch.device("cuda", 3))
    assert made == [torch.device("cuda", 3)]
