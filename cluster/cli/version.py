"""`tandem version`: ours, and those of the parts that decide how it behaves."""

from __future__ import annotations

import platform
from importlib import metadata

from cluster.cli.options import JsonOption
from cluster.cli.terminal import Terminal

_PARTS = ("torch", "ray", "transformers", "safetensors", "fastapi", "msgspec")


def version(as_json: JsonOption = False) -> None:
    """Print the versions of Tandem and of what it runs on."""
    terminal = Terminal(as_json=as_json)
    versions = {"tandem": _installed("tandem"), "python": platform.python_version()}
    versions |= {part: _installed(part) for part in _PARTS}
    if as_json:
        terminal.emit(**versions)
        return
    for name, found in versions.items():
        terminal.say(f"{name:13} {found}")


def _installed(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"
