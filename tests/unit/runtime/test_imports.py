"""The engine on a bare machine: nothing of the cluster is imported, and ranks load no more than they need."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
BLOCK = "import sys; sys.modules.update(dict.fromkeys(('ray', 'pydantic', 'fastapi', 'msgspec', 'uvicorn')));"


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "module",
    ["workers.engine.loop", "workers.runtime.rank", "workers.runtime.launch", "workers.runtime.follower"],
)
def test_without_the_cluster(module: str) -> None:
    run(f"{BLOCK} import {module}")


def test_help_without_the_cluster() -> None:
    shown = run(
        f"{BLOCK} import runpy; sys.argv = ['workers', '--help'];\n"
        "try:\n    runpy.run_module('workers', run_name='__main__')\n"
        "except SystemExit as end:\n    assert end.code == 0"
    )
    assert "generate" in shown and "bench" in shown


def test_a_follower_does_without_transformers() -> None:
    run("import sys, workers.runtime.follower; assert 'transformers' not in sys.modules")


def test_nothing_is_unpickled() -> None:
    """Peer data goes through struct, int32 arrays and JSON only."""
    for file in (ROOT / "workers" / "runtime").glob("*.py"):
        text = file.read_text()
        for word in ("import pickle", "torch.load", "marshal", "send_object", "all_gather_object", "eval("):
            assert word not in text, f"{file.name}: {word}"
