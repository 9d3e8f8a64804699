"""The board of a real group directory in this process, which can be taken away and made anew."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tests.unit.directory.entries import FakeClock
from workers.directory.groups import GroupDirectory
from workers.directory.snapshots import HeldSnapshot, Snapshot


class LocalBoard:
    """router.telemetry.publisher.Board without Ray."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.error: Exception | None = None  # what calls raise
        self.is_silent = False  # calls do not come back
        self.num_published = 0
        self.num_refused = 0
        self.restart()

    def restart(self) -> None:
        """An empty directory, as after the old one has died."""
        self._directory = GroupDirectory("d", clock=self.clock)

    async def publish(self, snapshot: Snapshot) -> None:
        """See `Board`."""
        await self._call()
        self._directory.snapshots.publish(snapshot)
        self.num_published += 1

    async def held(self) -> Sequence[HeldSnapshot]:
        """See `Board`."""
        await self._call()
        return self._directory.snapshots.held()

    async def _call(self) -> None:
        if self.is_silent:
            await asyncio.sleep(3600)
        if self.error is not None:
            self.num_refused += 1
            raise self.error
        await asyncio.sleep(0)
