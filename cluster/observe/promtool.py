"""Prometheus' own opinion of the alert rules."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path
from typing import Final

import yaml

from cluster.observe.prometheus_api import ObserveError
from dashboards import alerts

_TIMEOUT_S: Final = 60.0


def check_rules(promtool: Path) -> list[str]:
    """What `promtool check rules` finds wrong, a line each. Raises ObserveError."""
    with tempfile.TemporaryDirectory(prefix="tandem-rules-") as name:
        file = Path(name) / "alerts.yml"
        file.write_text(yaml.safe_dump(alerts.rules(), sort_keys=False), encoding="utf-8")
        try:
            done = subprocess.run(
                [str(promtool), "check", "rules", str(file)],
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise ObserveError(f"{promtool} has not checked the rules in {_TIMEOUT_S:g} s") from error
    if done.returncode == 0:
        return []
    return (done.stdout + done.stderr).strip().splitlines() or [f"{promtool} ended with {done.returncode}"]
