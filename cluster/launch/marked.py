"""Processes of one cluster, found by the mark that they inherit in their environment.

Ray starts many processes, some in sessions of their own; when its head dies, not all of them end. The mark is
how exactly those of one cluster, and no others on the machine, are found and ended.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from cluster.running.process import process_start

MARK = "TANDEM_CLUSTER_MARK"


def marked_processes(mark: str) -> Iterator[int]:
    """Ids of living processes that carry the mark of a cluster; never our own."""
    wanted = f"{MARK}={mark}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                environment = (entry / "environ").read_bytes().split(b"\0")
            except OSError:  # ended meanwhile, or not ours to read
                continue
            if wanted in environment and process_start(int(entry.name)) is not None:
                yield int(entry.name)


def end_marked(mark: str, *, term_s: float, kill_s: float) -> list[str]:
    """End every marked process: ask, wait for `term_s`, kill, wait for `kill_s`.

    Returns id and title of those that had to be killed.
    """
    if not _signal_all(mark, signal.SIGTERM, term_s):
        return []
    killed: list[str] = []
    deadline = time.monotonic() + kill_s
    while alive := list(marked_processes(mark)):  # again and again: one may have started another meanwhile
        killed += [f"{pid} {_title(pid)}" for pid in alive]
        _signal_all(mark, signal.SIGKILL, min(1.0, kill_s))
        if time.monotonic() > deadline:
            break
    return list(dict.fromkeys(killed))


def _signal_all(mark: str, number: signal.Signals, wait_s: float) -> bool:
    """Signal every marked process and wait for their end; whether any is left."""
    for pid in marked_processes(mark):
        with suppress(OSError):
            os.kill(pid, number)
    deadline = time.monotonic() + wait_s
    while is_left := any(True for _ in marked_processes(mark)):
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    return is_left


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:120]
    except OSError:
        return ""
