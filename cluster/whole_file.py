"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def replace_file(file: Path, text: str, *, mode: int = 0o644) -> None:
    """Write a file in one step: a reader never sees a part of it, and a write that fails leaves nothing.

    Raises OSError.
    """
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="") as stream:
            stream.write(text)
        draft.chmod(mode)
        draft.replace(file)
    finally:
        draft.unlink(missing_ok=True)
