"""Huge pages for what the process has: nothing of it changes, and what it never touched stays away."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from workers.kernels import HUGE_PAGE_BYTES
from workers.runtime.heap import use_huge_pages

_STATUS = Path("/proc/self/status")


def _resident_bytes() -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(not _STATUS.exists(), reason="needs /proc")
def test_memory_keeps_its_content_and_untouched_memory_is_not_taken() -> None:
    num_bytes = 8 * HUGE_PAGE_BYTES
    written = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    written[:] = bytes(range(256)) * (num_bytes // 256)
    untouched = mmap.mmap(-1, 64 * HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    before = _resident_bytes()
    use_huge_pages()
    assert _resident_bytes() - before < 64 * HUGE_PAGE_BYTES
    assert written[:] == bytes(range(256)) * (num_bytes // 256)
    assert not any(untouched[:: mmap.PAGESIZE])
