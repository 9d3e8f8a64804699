"""Ending asyncio tasks for certain."""

from __future__ import annotations

import asyncio
from typing import Any

_CANCEL_AGAIN_S = 0.5  # longer than any clean-up takes, so that it is not cut short


async def end_tasks(*tasks: asyncio.Task[Any]) -> None:
    """Cancels tasks until they have unwound.

    One cancellation can get lost: `asyncio.wait_for` before Python 3.12 swallows it when its result arrives
    in the same moment, as it often does under load.
    """
    left: set[asyncio.Task[Any]] = set(tasks)
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=_CANCEL_AGAIN_S)
    await asyncio.gather(*tasks, return_exceptions=True)  # their exceptions have been seen
