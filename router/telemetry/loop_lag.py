"""How late the event loop runs what is due: what everything on it waits for, tokens included."""

from __future__ import annotations

import asyncio
from typing import Final

from workers.histogram import HistogramCell

_PERIOD_S: Final = 0.25


async def observe_lag(cell: HistogramCell) -> None:
    """A sample each period, seconds, until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + _PERIOD_S
        await asyncio.sleep(_PERIOD_S)
        cell.observe(max(0.0, loop.time() - due))
