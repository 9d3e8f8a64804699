"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def replace_file(file: Path, text: str, *, mode: int | None = None) -> None:
    """Write a file in one step: a reader never sees a part of it, and a write that fails leaves nothing.

    mode: None: as new files have it here. Raises OSError.
    """
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666 if mode is None else mode)
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="") as stream:
            stream.write(text)
        if mode is not None:
            draft.chmod(mode)
        draft.replace(file)
    finally:
        draft.unlink(missing_ok=True)
