"""Files that commands write: checked before the work, made with their folders, and named when they fail.

A file that is there is not written over without `--force`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster.bench.report import report_text
from cluster.cli.terminal import CommandFailed


def check_output(file: Path | None, *, force: bool) -> None:
    """Makes the folder of a file to be written later, and tries whether it can be. Raises CommandFailed, also
    for a file that is there, unless it is to be written over by `force`. (A pipe or device keeps nothing.)"""
    if file is None:
        return
    make_folder_of(file)
    if file.is_dir():
        raise CommandFailed(f"{file}: it is a folder, a file is needed")
    if file.is_file() and not force:
        raise CommandFailed(f"{file} is there already: name another file, or write over it with --force")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise CommandFailed(f"{file}: there is no permission to write it")


def make_folder_of(place: Path) -> None:
    """That a file or folder is to be in. Raises CommandFailed."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandFailed(f"{place}: its folder cannot be made: {error.strerror}") from error


def write_output(file: Path, text: str) -> None:
    """Raises CommandFailed, naming the file."""
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandFailed(f"{file}: {error.strerror}") from error


def write_report(file: Path, content: Mapping[str, Any]) -> None:
    """What a benchmark gives. Raises CommandFailed, also for numbers that JSON has no words for."""
    try:
        text = report_text(content)
    except ValueError as error:
        raise CommandFailed(f"{file}: the report cannot be said in JSON: {error}") from error
    write_output(file, text)
