"""The directory actor of an application as the board of its routers' counts."""

from __future__ import annotations

from collections.abc import Sequence

from ray.exceptions import RayError

from router.directory_source import DirectoryHandle
from workers.directory.snapshots import HeldSnapshot, Snapshot


class DirectoryBoard:
    """A `Board`. Raises RayError or ValueError without a directory; finds the next."""

    def __init__(self, directory: DirectoryHandle) -> None:
        self._directory = directory

    async def publish(self, snapshot: Snapshot) -> None:
        """See `workers.directory.snapshots.SnapshotTable.publish`."""
        directory = await self._directory.get()
        try:
            await directory.publish.remote(snapshot)
        except RayError:
            self._directory.lose()
            raise

    async def held(self) -> Sequence[HeldSnapshot]:
        """See `workers.directory.snapshots.SnapshotTable.held`."""
        directory = await self._directory.get()
        try:
            held: Sequence[HeldSnapshot] = await directory.snapshots.remote()
        except RayError:
            self._directory.lose()
            raise
        return held
