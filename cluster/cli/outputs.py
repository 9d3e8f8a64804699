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
from cluster.whole_file import replace_file


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
    place = _place_of(file)
    needed = [place.parent] if not place.exists() else [place, place.parent] if place.is_file() else [place]
    if not all(os.access(each, os.W_OK) for each in needed):  # the folder too: see `write_output`
        raise CommandFailed(f"{file}: there is no permission to write it")


def _place_of(file: Path) -> Path:
    """What is written over: a link goes on pointing there, a pipe or device is asked for as it was named."""
    return file if file.exists() and not file.is_file() else Path(os.path.realpath(file))


def make_folder_of(place: Path) -> None:
    """That a file or folder is to be in. Raises CommandFailed."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandFailed(f"{place}: its folder cannot be made: {error.strerror}") from error


def write_output(file: Path, text: str) -> None:
    """Whole or not at all: a full disk leaves what was there. Raises CommandFailed, naming the file."""
    place = _place_of(file)
    try:
        if place.is_file():
            replace_file(place, text, mode=place.stat().st_mode & 0o777)
        elif place.exists():  # a pipe or device
            place.write_text(text, encoding="utf-8")
        else:
            replace_file(place, text)
    except OSError as error:
        raise CommandFailed(f"{file}: {error.strerror}") from error


def write_report(file: Path, content: Mapping[str, Any]) -> None:
    """What a benchmark gives. Raises CommandFailed, also for numbers that JSON has no words for."""
    try:
        text = report_text(content)
    except ValueError as error:
        raise CommandFailed(f"{file}: the report cannot be said in JSON: {error}") from error
    write_output(file, text)
