"""A GGUF file that a person names, converted to a folder of theirs: complete or not there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from cluster.models.gguf_model import GgufError, write_folder

# What the reader of the `gguf` package raises for a damaged file.
_DAMAGE = (ValueError, IndexError, KeyError, TypeError, OverflowError, AttributeError, MemoryError)


def convert_file(file: Path, out: Path, progress: Callable[[str], None]) -> None:
    """Writes the folder `out`, which must not exist or be empty.

    Raises GgufError for a file that is damaged or not covered, FileExistsError, and OSError as for a full
    disk; then nothing is left behind.
    """
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"{out} exists and is not an empty folder: name another, or remove it")
    temporary = out.absolute().parent / f".{out.name}.tmp-{os.getpid()}"
    temporary.mkdir()
    try:
        write_folder(file, temporary, progress)
        temporary.rename(out)
    except GgufError as error:
        raise GgufError(f"{file} cannot be converted: {error}") from error
    except _DAMAGE as error:
        raise GgufError(f"{file} is damaged or no GGUF file: {type(error).__name__}: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
