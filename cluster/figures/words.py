"""Numbers in sentences."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """`1 device`, `1,024 devices`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
