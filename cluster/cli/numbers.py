"""Whole numbers in the words of a command line, and the largest that commands take."""

from __future__ import annotations

MOST_TOKENS = 1 << 24  # of a prompt or an answer, as in traces
MOST_REQUESTS = 10**9
MOST_BLOCKS = 1 << 22  # of a group's pool


def whole_number(text: str, *, most: int) -> int | None:
    """The number that decimal digits say; None for any other text, and for one above `most`."""
    if not (text.isascii() and text.isdecimal() and len(text) <= len(str(most))):
        return None
    return number if (number := int(text)) <= most else None
