"""Ending asyncio tasks for certain."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

_CANCEL_AGAIN_S = 0.5  # longer than any clean-up takes, so that it is not cut short
_LOG_EVERY = 20  # cancellations that changed nothing: 10 s

_log = logging.getLogger(__name__)


async def end_tasks(*tasks: asyncio.Task[Any]) -> None:
    """Cancels tasks until they have unwound; says every 10 s which ones do not.

    One cancellation can get lost: `asyncio.wait_for` before Python 3.12 swallows it when its result arrives
    in the same moment, as it often does under load.
    """
    left: set[asyncio.Task[Any]] = set(tasks)
    rounds = 0
    while left:
        if rounds and rounds % _LOG_EVERY == 0:
            names = ", ".join(sorted(str(task.get_coro()) for task in left))
            _log.error("cancelled %.0f s ago and not ended: %s", rounds * _CANCEL_AGAIN_S, names)
        rounds += 1
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=_CANCEL_AGAIN_S)
    await asyncio.gather(*tasks, return_exceptions=True)  # their exceptions have been seen
