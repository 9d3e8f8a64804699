"""Whole numbers in the words of a command line."""

from __future__ import annotations


def whole_number(text: str, *, most: int) -> int | None:
    """The number that decimal digits say; None for any other text, and for one above `most`."""
    if not (text.isascii() and text.isdecimal() and len(text) <= len(str(most))):
        return None
    return number if (number := int(text)) <= most else None
