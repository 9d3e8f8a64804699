"""A lock between processes on a file. The kernel drops it should its holder die."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_POLL_S = 0.05


@contextmanager
def file_lock(path: Path, *, timeout_s: float, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Holds an exclusive lock on `path`, which is made when absent.

    `on_wait` hears once when another process has it. Raises TimeoutError after `timeout_s`, OSError when the
    file cannot be opened.
    """
    deadline = time.monotonic() + timeout_s
    is_told = False
    with path.open("a") as stream:
        while True:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"another process has held {path} for {timeout_s:g} s") from None
                if not is_told:
                    on_wait()
                    is_told = True
                time.sleep(_POLL_S)
        yield
