"""Runs the tests of the Triton kernels in a process of Triton's interpreter, a file at a time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from workers.kernels.gpu.interpreter import can_run

ROOT = Path(__file__).resolve().parents[3]
FILES = sorted((Path(__file__).parent / "gpu").glob("test_*.py"))

pytestmark = [
    pytest.mark.skipif(can_run(), reason="this process runs them itself"),
    pytest.mark.timeout(600),
]


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
