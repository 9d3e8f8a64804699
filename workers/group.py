"""The front of a worker group: a Serve replica that owns the rank processes. It never loads torch.

Life cycle: `__init__` starts one actor a rank in the replica's placement group, lets them load, connects to
rank 0 and registers in the directory. From then on it hands requests in (`submit`) and watches the ranks: a
rank that ends, a lost connection to rank 0 or a report of failure ends the group. The front then tells the
directory why, ends what is left of the ranks, and reports ill health until Serve replaces the replica. Serve
removing the replica ends in `__del__`: take nothing new, let requests finish, stop the ranks.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from prometheus_client.metrics_core import Metric
from ray import serve

from workers.config import GroupConfig
from workers.data_plane.channel import ClientIdentity, HandshakeFailed
from workers.data_plane.signals import SignalWindow
from workers.data_plane.submit import SubmitClient, SubmitRefused
from workers.directory.groups import GroupEntry, GroupPhase
from workers.directory.lease import DirectoryLease
from workers.group_start import GroupStart, group_id_of
from workers.metrics.families import group_families
from workers.metrics.group import GroupSight
from workers.metrics.ray_export import keep_exporting
from workers.ranks.rank_set import RankSet
from workers.secret import application_secret
from workers.tasks import start_task
from workers.types import GenerateRequest, GroupId, GroupInfo, Role

_log = logging.getLogger("ray.serve")


class GroupFailure(RuntimeError):
    """The group cannot serve; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontSettings:
    """What a front is told."""

    pool: str  # also the name of its Serve deployment
    role: Role
    config: GroupConfig
    on_loopback: bool
    start_timeout_s: float
    drain_timeout_s: float
    scaling: Mapping[str, float] = field(default_factory=dict)  # told with the load, as it is


class WorkerGroup:
    """Serve replica class; one asyncio loop, so no locks."""

    async def __init__(self, settings: FrontSettings) -> None:  # type: ignore[misc]  # Serve awaits it
        context = serve.get_replica_context()
        replica_id = context.replica_id.unique_id
        self._settings = settings
        self._failure: str | None = None
        self._has_failed = asyncio.Event()
        self._client: SubmitClient | None = None
        self._info: GroupInfo | None = None
        self._watch: asyncio.Task[None] | None = None
        self._export: asyncio.Task[None] | None = None
        self._signals = SignalWindow(time.monotonic, settings.scaling)
        # Serve gives a rebuilt group a new replica id, so one id has one epoch.
        entry = GroupEntry(
            group_id=group_id_of(settings.pool, replica_id),
            replica_id=replica_id,
            pool=settings.pool,
            role=settings.role,
            epoch=1,
            phase=GroupPhase.LOADING,
        )
        secret = await asyncio.to_thread(application_secret, context.app_name)
        start = GroupStart(
            config=settings.config,
            group_id=entry.group_id,
            epoch=entry.epoch,
            role=settings.role,
            secret=secret,
            on_loopback=settings.on_loopback,
        )
        self._lease = DirectoryLease(context.app_name, entry)
        self._lease.start()
        self._ranks = RankSet(start)
        try:
            async with asyncio.timeout(settings.start_timeout_s):
                await self._start_group(secret)
        except BaseException as error:
            await self._ranks.end()
            await self._lease.stop()
            _log.exception("group %s did not start", entry.group_id)
            if not isinstance(error, Exception):  # cancelled
                raise
            raise GroupFailure(self._start_error(error)) from None  # what Serve shows is this sentence
        self._watch = start_task(self._watch_ranks(), f"the watch over the ranks of {entry.group_id}")
        self._export = asyncio.create_task(keep_exporting(self._families))

    async def submit(
        self, client_id: str, request: GenerateRequest, ranked_groups: tuple[str, ...]
    ) -> GroupId:
        """Hand a request to the engine; its tokens go to the connection of `client_id`. Returns this group.

        `ranked_groups` is read by the request router on the way here. Raises SubmitRefused.
        """
        if self._failure is not None:
            raise SubmitRefused(f"the group failed: {self._failure}", code="group_failed")
        if self._client is None or self._lease.entry.phase is GroupPhase.DRAINING:
            raise SubmitRefused("the group takes no new requests", code="group_draining")
        await self._client.submit(client_id, request)
        return self._lease.entry.group_id

    async def check_health(self) -> None:
        """Called by Serve every second; an exception, three times in a row, makes it replace the replica."""
        if self._failure is not None:
            raise GroupFailure(self._failure)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Serve when the pool is autoscaled: the load, for `cluster.scaling`."""
        return self._signals.numbers(self._client.stats) if self._client is not None else {}

    async def present(self) -> None:
        """Returns at once. A call that waits for the first group of a pool makes Serve start one."""

    async def __del__(self) -> None:
        """Serve's call before it ends the replica."""
        if self._failure is None:
            self._lease.change(replace(self._lease.entry, phase=GroupPhase.DRAINING))
            left = await self._ranks.drain(self._settings.drain_timeout_s)
            if left:
                _log.warning("group %s ends with %d requests unfinished", self._lease.entry.group_id, left)
        for task in (self._watch, self._export):
            if task is not None:
                task.cancel()
        if self._client is not None:
            self._client.close()
        await self._ranks.stop("the group was stopped")
        await self._lease.stop()

    async def _start_group(self, secret: bytes) -> None:
        entry = self._lease.entry
        places = await self._ranks.start()
        self._lease.change(
            replace(entry, reason="loading the model", rank_pids=tuple(place.pid for place in places))
        )
        loaded = await self._ranks.load()
        self._info = loaded.info
        identity = ClientIdentity(client_id=f"front-{entry.group_id}", secret=secret, subscribes=False)
        self._client = SubmitClient(identity, on_lost=lambda reason: self._fail(f"rank 0 is gone: {reason}"))
        await self._client.connect(*loaded.address)
        if self._failure is not None:  # rank 0 is gone already
            raise GroupFailure(self._failure)
        self._lease.change(
            replace(self._lease.entry, phase=GroupPhase.READY, reason="", address=loaded.address)
        )
        _log.info("group %s is ready: %s", entry.group_id, loaded.info)

    def _families(self) -> Iterable[Metric]:
        """The group's series, for Ray's own metrics."""
        assert self._client is not None and self._info is not None
        entry = self._lease.entry
        sight = GroupSight(
            role=entry.role.value,
            epoch=entry.epoch,
            is_ready=self._failure is None and entry.phase is GroupPhase.READY,
            info=self._info,
            stats=self._client.stats,
            report=self._client.report,
        )
        return group_families(sight, self._info)

    def _start_error(self, error: Exception) -> str:
        if isinstance(error, TimeoutError):
            return f"the group did not start within {self._settings.start_timeout_s:g} s"
        if isinstance(error, HandshakeFailed):
            return f"rank 0 does not answer: {error}"
        return f"the group did not start: {error}"

    async def _watch_ranks(self) -> None:
        """Ends the ranks once one is over or rank 0 is silent: a stopped process does not end by itself."""
        first_end = asyncio.create_task(self._ranks.first_end())
        lost = asyncio.create_task(self._has_failed.wait())
        try:
            await asyncio.wait((first_end, lost), return_when=asyncio.FIRST_COMPLETED)
            if first_end.done():
                self._fail(first_end.result())
        finally:
            first_end.cancel()
            lost.cancel()
        await self._ranks.end()

    def _fail(self, reason: str) -> None:
        if self._failure is None and self._lease.entry.phase is not GroupPhase.DRAINING:
            self._failure = reason
            self._has_failed.set()
            self._lease.change(replace(self._lease.entry, phase=GroupPhase.FAILED, reason=reason))
            _log.error("group %s failed: %s", self._lease.entry.group_id, reason)
