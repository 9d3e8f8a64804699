"""Shapes of tiles: powers of two, by the size of what they hold."""

from __future__ import annotations

import triton


def width_of(size: int) -> int:
    """The power of two that holds `size` elements."""
    width: int = triton.next_power_of_2(size)
    return width


def warps_of(elements: int) -> int:
    """Warps for a tile that is read once: 16 elements a thread, 1 to 16 warps."""
    return max(1, min(16, width_of(elements) // 512))
