"""Children of this process that are programs of this package: `python -m cluster...`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]


def module_command(module: str, *arguments: str) -> list[str]:
    """The command. -P: a folder named like a package where the person stands is not imported in its place."""
    return [sys.executable, "-P", "-m", module, *arguments]


def module_path() -> str:
    """PYTHONPATH with which it finds this package also where that is not installed."""
    return os.pathsep.join(entry for entry in (os.environ.get("PYTHONPATH", ""), str(_ROOT)) if entry)
