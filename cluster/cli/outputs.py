"""Files that commands write: checked before the work, made with their folders, and named when they fail."""

from __future__ import annotations

import os
from pathlib import Path

from cluster.cli.terminal import CommandFailed


def check_output(file: Path | None) -> None:
    """Makes the folder of a file to be written later, and tries whether it can be. Raises CommandFailed."""
    if file is None:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandFailed(f"{file}: its folder cannot be made: {error.strerror}") from error
    if file.is_dir():
        raise CommandFailed(f"{file}: it is a folder, a file is needed")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise CommandFailed(f"{file}: there is no permission to write it")


def write_output(file: Path, text: str) -> None:
    """Raises CommandFailed, naming the file."""
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandFailed(f"{file}: {error.strerror}") from error
