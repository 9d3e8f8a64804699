"""Huge pages for what Python and malloc hold.

After a step every cache is cold, and so are the tables of pages: each page of 4 KiB that the host touches
between two steps costs a walk through them, in a virtual machine one of many reads.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

from workers.kernels import HUGE_PAGE_BYTES

_COLLAPSE = 25  # MADV_COLLAPSE, Linux 6.1
_LARGEST_BYTES = 256 << 20  # weights and pools are larger, and asked for huge pages when they were made
_MAPS = Path("/proc/self/maps")


def use_huge_pages() -> int:
    """Moves the private memory that this process has touched so far into huge pages, as far as the kernel
    goes along; memory that was never touched stays so. Returns how many there came to be."""
    if not _MAPS.exists():
        return 0
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    num_huge = 0
    for first, end in _private_memory(_MAPS.read_text()):
        if end - first <= _LARGEST_BYTES:
            for page in range(-(-first // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES, end, HUGE_PAGE_BYTES):
                if page + HUGE_PAGE_BYTES <= end:
                    num_huge += madvise(page, HUGE_PAGE_BYTES, _COLLAPSE) == 0
    return num_huge


def _private_memory(maps: str) -> list[tuple[int, int]]:
    """(first address, end) of what is writable and of no file."""
    found = []
    for line in maps.splitlines():
        bounds, access, _, _, inode, *_ = line.split(maxsplit=5)
        if access == "rw-p" and inode == "0":
            first, end = bounds.split("-")
            found.append((int(first, 16), int(end, 16)))
    return found
