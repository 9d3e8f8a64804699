"""What is said while something starts."""

from __future__ import annotations

import re
from collections.abc import Callable

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")

Report = Callable[[str], None]  # receives one line of news while something starts


def unheard(text: str) -> None:
    """A Report for whoever does not want to hear."""


def without_colours(text: str) -> str:
    """Ray's words without what colours them on a terminal."""
    return _COLOUR.sub("", text)
