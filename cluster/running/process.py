"""Processes as the kernel lists them."""

from __future__ import annotations

from pathlib import Path


def process_start(pid: int) -> int | None:
    """When a process started, in clock ticks since the machine did; None when it has ended."""
    try:
        # The name before the last parenthesis may hold any bytes.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] == b"Z" else int(fields[19])
