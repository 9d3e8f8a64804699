"""What all tests start from."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def _signals_are_not_ignored() -> Iterator[None]:
    """Under nohup, or in the background of a script, this process ignores signals that tests send, and so
    would every process that they start."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.getsignal(number) for number in usual}
    for number, handler in usual.items():
        if before[number] is signal.SIG_IGN:
            signal.signal(number, handler)
    yield
    for number, found in before.items():
        signal.signal(number, found)
