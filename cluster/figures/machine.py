"""Where a figure was measured, for people who read it later: machine, commit, versions, how busy it was."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ("tandem", "torch", "transformers", "ray")
_CPUINFO = Path("/proc/cpuinfo")


def cpu_model(cpuinfo: Path = _CPUINFO) -> str:
    """As the kernel names it."""
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def usable_cores() -> int:
    return len(os.sched_getaffinity(0))


def machine_name() -> str:
    """The kind of machine, the same for all that are built alike: calibrations are kept under it."""
    return f"{cpu_model()}, {usable_cores()} cores"


def machine_key() -> str:
    """Short form of `machine_name` for file names."""
    return hashlib.sha256(machine_name().encode()).hexdigest()[:12]


def commit() -> str:
    """Of the source this runs from, `-dirty` when files differ from it; `unknown` outside of a repository."""
    root = Path(__file__).resolve().parents[2]
    head = _git(root, "rev-parse", "HEAD")
    if not head or _git(root, "rev-parse", "--show-toplevel") != str(root):
        return "unknown"
    return head + ("-dirty" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")


def facts() -> dict[str, object]:
    """All of it, as plain data."""
    return {
        "commit": commit(),
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: found for name in _PACKAGES if (found := _version(name))},
        "load_averages": list(os.getloadavg()),  # far above our own threads: others ran beside us
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _git(root: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
