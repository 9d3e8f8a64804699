"""Whether grammars can be served at all: llguidance is optional where only the engine is installed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workers.structured.backend import LlguidanceBackend


def open_backend(folder: str | Path, vocab_size: int) -> LlguidanceBackend | None:
    """For the model of a folder; None where llguidance is not installed."""
    if find_spec("llguidance") is None:
        return None
    from workers.structured.backend import LlguidanceBackend  # only here: the package may be missing

    return LlguidanceBackend(folder, vocab_size)
