"""A front's entry in the directory: registered, renewed, and registered again when the directory is new."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from typing import Any

from ray.exceptions import RayError

from workers.directory.actor import open_directory
from workers.directory.groups import RENEW_S, GroupEntry
from workers.tasks import start_task

_CALL_TIMEOUT_S = 5.0
_log = logging.getLogger(__name__)


class DirectoryLease:
    """Keeps one entry in the directory. All methods belong to one asyncio loop."""

    def __init__(
        self,
        application: str,
        entry: GroupEntry,
        *,
        open_directory: Callable[[str, str], Any] = open_directory,
        renew_s: float = RENEW_S,
    ) -> None:
        """open_directory: makes a handle of the actor, for an application and an id should it be new."""
        self._application = application
        self._entry = entry
        self._open_directory = open_directory
        self._renew_s = renew_s
        self._directory: Any = None  # handle of the actor
        self._is_published = False
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def entry(self) -> GroupEntry:
        """What is, or is about to be, in the directory."""
        return self._entry

    def start(self) -> None:
        """Register, and renew from now on."""
        self._task = start_task(self._keep(), f"the lease of {self._entry.group_id}")

    def change(self, entry: GroupEntry) -> None:
        """Replace the entry; the directory hears of it at once, or when it is back."""
        self._entry = entry
        self._is_published = False
        self._changed.set()

    async def stop(self) -> None:
        """Withdraw the entry. A directory that cannot be reached forgets it when the lease runs out."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._task = None
        if self._directory is not None:
            try:
                async with asyncio.timeout(_CALL_TIMEOUT_S):
                    await self._directory.withdraw.remote(self._entry.group_id, self._entry.epoch)
            except (RayError, TimeoutError) as error:
                _log.warning("group %s not withdrawn: %s", self._entry.group_id, error)

    async def _keep(self) -> None:
        while True:
            self._changed.clear()
            try:
                async with asyncio.timeout(_CALL_TIMEOUT_S):
                    await self._register_or_renew()
            except (RayError, TimeoutError, ValueError) as error:  # ValueError: the name is just being freed
                _log.warning("directory of %s not reached: %s", self._application, error)
                self._directory, self._is_published = None, False
            except Exception:  # a task that ended would take a living group out of the list, without a word
                _log.exception("directory of %s", self._application)
                self._directory, self._is_published = None, False
            try:
                async with asyncio.timeout(self._renew_s):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def _register_or_renew(self) -> None:
        if self._directory is None:
            new_id = secrets.token_hex(8)
            self._directory = await asyncio.to_thread(self._open_directory, self._application, new_id)
        entry = self._entry
        if self._is_published and await self._directory.renew.remote(entry.group_id, entry.epoch):
            return
        await self._directory.register.remote(entry)
        self._is_published = entry is self._entry  # a change that came meanwhile is still to be told
