"""The directory actor of an application as the board of its routers' counts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from ray.exceptions import RayError

from router.directory_source import find_directory
from workers.directory.snapshots import HeldSnapshot, Snapshot


class DirectoryBoard:
    """A `Board`. Raises RayError or ValueError without a directory; finds the next."""

    def __init__(self, application: str) -> None:
        self._application = application
        self._directory: Any = None  # handle of the actor

    async def publish(self, snapshot: Snapshot) -> None:
        """See `workers.directory.snapshots.SnapshotTable.publish`."""
        directory = await self._found()
        try:
            await directory.publish.remote(snapshot)
        except RayError:
            self._directory = None
            raise

    async def held(self) -> Sequence[HeldSnapshot]:
        """See `workers.directory.snapshots.SnapshotTable.held`."""
        directory = await self._found()
        try:
            held: Sequence[HeldSnapshot] = await directory.snapshots.remote()
        except RayError:
            self._directory = None
            raise
        return held

    async def _found(self) -> Any:
        if self._directory is None:
            self._directory = await asyncio.to_thread(find_directory, self._application)
        return self._directory
