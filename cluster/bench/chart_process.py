"""Drawing in a process of its own: the library for pictures is optional and slow to load."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster.bench.child import MeasuringFailed, child_environment
from cluster.child import module_command

_TIMEOUT_S = 120.0


def draw(content: Mapping[str, Any], file: Path) -> None:
    """A report's picture. Raises MeasuringFailed with what went wrong."""
    file.parent.mkdir(parents=True, exist_ok=True)
    command = module_command("cluster.bench.chart", str(file))
    wanted = {name: value for name, value in content.items() if name != "machine"}
    try:
        done = subprocess.run(
            command,
            input=json.dumps(wanted),
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            env=child_environment(),
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise MeasuringFailed(f"not drawn within {_TIMEOUT_S:g} s") from error
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no reason given"]
        raise MeasuringFailed(f"it could not be drawn: {last[0]}")
