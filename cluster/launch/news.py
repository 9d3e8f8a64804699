"""What is said while something starts."""

from __future__ import annotations

from collections.abc import Callable

Report = Callable[[str], None]  # receives one line of news while something starts


def unheard(text: str) -> None:
    """A Report for whoever does not want to hear."""
