"""Numbers in sentences."""

from __future__ import annotations


def counted(number: int, noun: str, plural: str = "") -> str:
    """`1 device`, `1,024 devices`, `2 queries`. plural: where it is not the noun with an s."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {plural or f'{noun}s'}"
