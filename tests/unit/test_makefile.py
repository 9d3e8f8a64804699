"""What `make` does with a folder that an earlier run has left half made."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Stands for a Python: writes down what it is asked for, and makes no environment.
PYTHON = """#!/bin/sh
echo "$@" >> {log}
case "$2" in venv) exit 1;; esac
"""
WITHOUT_PIP = """#!/bin/sh
exit 1
"""


def test_an_environment_without_pip_is_made_again(tmp_path: Path) -> None:
    """Ctrl-C leaves one: Python comes first, pip some seconds later."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("pyproject.toml", "requirements/constraints.txt", "requirements/model.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    log, python, broken = tmp_path / "log", tmp_path / "python", tmp_path / ".venv/bin/python"
    broken.parent.mkdir(parents=True)
    for file, text in ((python, PYTHON.format(log=log)), (broken, WITHOUT_PIP)):
        file.write_text(text)
        file.chmod(0o700)
    command = ["make", "install", f"PYTHON={python}"]
    subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=30, check=False)
    assert log.read_text().splitlines()[-1] == "-m venv .venv"
