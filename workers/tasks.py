"""asyncio tasks that run for as long as their owner: one that ends by an error says so at once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from functools import partial

_log = logging.getLogger(__name__)


def start_task(work: Coroutine[None, None, None], what: str) -> asyncio.Task[None]:
    """Runs `work` on the running loop. Whoever holds the task cancels it; an error is logged with `what` it
    was: nobody may look at the task before its owner ends, and then only to cancel it."""
    task = asyncio.get_running_loop().create_task(work)
    task.add_done_callback(partial(_say_error, what))
    return task


def _say_error(what: str, task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("%s ends: %r", what, error, exc_info=error)
