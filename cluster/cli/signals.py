"""Ctrl-C, SIGTERM and a closing terminal as one thing: KeyboardInterrupt in the main thread."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def interrupts() -> Iterator[None]:
    """Inside, each stopping signal raises KeyboardInterrupt. Only for the main thread.

    A hang-up that is ignored stays so: `nohup` asks for that.
    """

    def raise_interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    numbers = [number for number in _STOPPING if number != signal.SIGHUP or not is_ignored]
    before = {number: signal.signal(number, raise_interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
