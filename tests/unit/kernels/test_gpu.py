"""The Triton kernels, in processes of their own: their tests in Triton's interpreter, a file at a time, and
their compilation for a GPU that need not be there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from workers.kernels.gpu.interpreter import can_run

ROOT = Path(__file__).resolve().parents[3]
FILES = sorted((Path(__file__).parent / "gpu").glob("test_*.py"))

_SHARED_BYTES = 227 << 10  # that a program can have on an H100 or H200
_SPILLED_BYTES = 64  # of a thread: 16 registers

pytestmark = pytest.mark.timeout(600)


@pytest.mark.skipif(can_run(), reason="this process runs them itself")
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_in_the_interpreter(file: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=590,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


def test_they_compile_for_hopper(tmp_path: Path) -> None:
    """All fit in the shared memory of a multiprocessor and, but for a few, in its registers; products use its
    matrix units."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.kernels.gpu.hopper", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"TRITON_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=590,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    launches = [json.loads(line) for line in done.stdout.splitlines()]
    assert {each["kernel"] for each in launches} == {
        *("_rms_norm", "_layer_norm", "_activate", "_rotary_and_write", "attend", "fold_splits", "_product"),
        *("scan_block", "weigh_block", "draw_row"),
    }
    for each in launches:
        assert each["stack_bytes"] <= _SPILLED_BYTES and each["shared_bytes"] <= _SHARED_BYTES, each
        assert (each["matrix_products"] > 0) == (each["kernel"] in ("attend", "_product")), each
