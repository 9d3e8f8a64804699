"""What holds for the whole source tree: layers, no pickle, what a process may load."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("workers", "router", "dashboards", "cluster", "benchmarks")
SOURCES = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
# Ways to run code out of data. `torch.load` unpickles.
_FORBIDDEN_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}
_FORBIDDEN_CALLS = re.compile(
    r"torch\.(load|save)\(|torch\.distributed\.\w*_object|trust_remote_code=True|\beval\(|\bexec\("
)


def test_imports_point_one_way() -> None:
    done = subprocess.run(
        [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: str(file.relative_to(ROOT)))
def test_no_file_can_unpickle(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0])
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".from_pretrained"):
            # Unsaid, transformers asks at the terminal whether it may run what lies in the folder.
            assert "trust_remote_code=False" in map(ast.unparse, node.keywords), f"line {node.lineno}"
    assert found & _FORBIDDEN_MODULES == set()
    assert _FORBIDDEN_CALLS.findall(text) == []


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("router.http.app", ("torch", "ray")),
        ("router.serving.service", ("torch", "ray")),
        ("cluster.cli.commands", ("torch", "transformers")),
        ("workers.model.decoder", ("triton", "ray")),
    ],
)
def test_what_an_import_does_not_load(module: str, absent: tuple[str, ...]) -> None:
    program = f"import sys, {module}; print([name for name in {absent!r} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout == "[]\n"


def test_files_stay_short() -> None:
    files = [*SOURCES, *(ROOT / "tests").rglob("*.py")]
    lines = {str(file.relative_to(ROOT)): len(file.read_text().splitlines()) for file in files}
    assert {name: number for name, number in lines.items() if number > 400} == {}
