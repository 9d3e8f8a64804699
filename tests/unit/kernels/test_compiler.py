"""Building the C++ library, and doing without it."""

from __future__ import annotations

import ctypes
import logging
import runpy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from workers.kernels import TorchKernels, kernels_for
from workers.kernels.compiler import KernelsUnavailable, library
from workers.kernels.library import Library


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "kernels.cpp").write_text('#include "answer.h"\nextern "C" int answer() { return ANSWER; }\n')
    (folder / "answer.h").write_text("#define ANSWER 42\n")
    return folder


def test_builds_once_and_again_when_a_header_changes(tmp_path: Path, sources: Path) -> None:
    cache = tmp_path / "cache"
    first = library(cache, sources)
    built = first.stat().st_mtime_ns
    assert ctypes.CDLL(str(first)).answer() == 42
    assert library(cache, sources) == first and first.stat().st_mtime_ns == built
    (sources / "answer.h").write_text("#define ANSWER 43\n")
    second = library(cache, sources)
    assert second != first and ctypes.CDLL(str(second)).answer() == 43


def test_ranks_that_start_together_share_one_build(tmp_path: Path, sources: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(lambda _: library(tmp_path / "cache", sources), range(4)))
    assert len(set(paths)) == 1
    assert sorted(p.name for p in paths[0].parent.iterdir()) == ["kernels.so", "lock"]


def test_failed_build_says_what_the_compiler_said(tmp_path: Path, sources: Path) -> None:
    (sources / "answer.h").write_text("#error no answer today\n")
    with pytest.raises(KernelsUnavailable, match="no answer today"):
        library(tmp_path / "cache", sources)
    assert not list((tmp_path / "cache").rglob("*.so"))


def test_without_compiler_torch_is_used_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "")
    with caplog.at_level(logging.WARNING):
        kernels = kernels_for(torch.device("cpu"), torch.bfloat16)
    assert isinstance(kernels, TorchKernels)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "install g++" in caplog.text


def test_installing_goes_on_without_a_compiler(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which runs this as a program, and stops at any exit code but 0."""
    monkeypatch.setenv("PATH", "")
    runpy.run_module("workers.kernels.build", run_name="__main__")
    assert "torch operators will be used instead" in capsys.readouterr().out


def test_compiler_that_does_not_run_is_named(
    tmp_path: Path, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "bin" / "g++"
    broken.parent.mkdir()
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(broken.parent))
    with pytest.raises(KernelsUnavailable, match="does not work"):
        library(tmp_path / "cache", sources)


def test_library_that_does_not_load_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "kernels.so").write_bytes(b"half a file")
    with pytest.raises(KernelsUnavailable, match="cannot load"):
        Library(tmp_path / "kernels.so")


def test_unwritable_cache_is_named(tmp_path: Path, sources: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(KernelsUnavailable, match=str(tmp_path / "cache")):
        library(tmp_path / "cache", sources)


def test_other_devices_and_dtypes_get_torch() -> None:
    assert isinstance(kernels_for(torch.device("meta"), torch.float32), TorchKernels)
    assert isinstance(kernels_for(torch.device("cpu"), torch.float64), TorchKernels)
