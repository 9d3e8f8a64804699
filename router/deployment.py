"""The router as a Serve deployment: the only file that puts the HTTP service, placement and Ray together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextvars import Context
from dataclasses import dataclass, replace
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from router.build import build_service
from router.directory_board import DirectoryBoard
from router.directory_source import DirectoryHandle, DirectorySource
from router.dispatch.dispatcher import DispatchLimits, SocketDispatcher
from router.http.app import create_app
from router.routing.policy import PolicyConfig
from router.settings import RouterSettings
from router.starting_groups import StartingGroups
from router.tasks import end_tasks
from router.telemetry.publisher import MetricsPublisher
from router.text.tokenizer import TextTokenizer
from workers.group_start import pool_of
from workers.metrics.ray_export import keep_exporting
from workers.secret import application_secret
from workers.tasks import start_task
from workers.types import GenerateRequest, GroupId

_WAKE_TIMEOUT_S = 30.0  # of one question for a group
_log = logging.getLogger("ray.serve")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterStart:
    """What a router replica is told."""

    http: RouterSettings  # `replica` is filled in by the replica itself
    policy: PolicyConfig
    tokenizer_folder: str
    model_hash: str  # of the groups it places requests on, see `workers.types.GroupInfo`
    update_timeout_s: float  # longest wait for the first group of this model, while one of another serves


class GroupSender:
    """Hands requests to groups through Serve's handles; `router.request_router` follows the ranking."""

    def __init__(
        self,
        handles: Mapping[str, DeploymentHandle[Any]],
        new_handle: Callable[[str], DeploymentHandle[Any]],
    ) -> None:
        """`handles`: of the pools that this router was deployed with, by name. `new_handle`: of any other
        one; an update may replace the pools before it replaces the router."""
        self._handles = dict(handles)
        self._new_handle = new_handle

    async def __call__(self, ranked: Sequence[GroupId], client_id: str, request: GenerateRequest) -> GroupId:
        """Which group of the best one's pool took the request. Raises what the front raised, or what Serve
        did."""
        pool = pool_of(ranked[0])
        if pool not in self._handles:
            self._handles[pool] = self._new_handle(pool)
        submit = self._handles[pool].submit
        # Serve numbers a call by the HTTP request it finds in the context, and loses one of two calls with
        # the same number: the prompts of one list would be such. In an empty context each has its own.
        response = Context().run(submit.remote, client_id, request, ranked_groups=tuple(ranked))
        taken_by: GroupId = await response
        return taken_by


class GroupWaker:
    """Asks Serve for a group: a call that waits in its queue makes it start one for a pool at zero."""

    def __init__(self, handles: Mapping[str, DeploymentHandle[Any]]) -> None:
        """A handle of each pool, by name."""
        self._handle = handles.get("unified") or handles["decode"]
        self._call: asyncio.Task[None] | None = None

    def __call__(self) -> None:
        """Asks, unless an earlier question is still open."""
        if self._call is None or self._call.done():
            self._call = asyncio.get_running_loop().create_task(self._ask())

    async def stop(self) -> None:
        """Asks no more."""
        if self._call is not None:
            await end_tasks(self._call)

    async def _ask(self) -> None:
        response = Context().run(self._handle.present.remote)
        try:
            async with asyncio.timeout(_WAKE_TIMEOUT_S):
                await response
        except Exception as error:  # whatever Serve raises: it is asked again while somebody waits
            response.cancel()  # type: ignore[no-untyped-call]  # Ray's
            _log.warning("no group has come yet: %r", error)


@serve.ingress()
class Router:
    """Serve replica class. Starting it waits for no group: `/ready` says when there is one.

    But an update to another model waits for the first group of it: until then Serve keeps the router of the
    old model, whose groups still answer, and if none comes up the old pair stays.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, start: RouterStart, groups: Mapping[str, DeploymentHandle[Any]]
    ) -> None:
        context = serve.get_replica_context()
        settings = replace(start.http, replica=context.replica_id.unique_id)
        secret = await asyncio.to_thread(application_secret, context.app_name)
        tokenizer = await asyncio.to_thread(TextTokenizer.load, start.tokenizer_folder)
        directory = DirectoryHandle(context.app_name)
        source = DirectorySource(directory)
        self._waker = GroupWaker(groups)
        self._starting = starting = StartingGroups(context.app_name)
        self._dispatcher = SocketDispatcher(
            secret=secret,
            source=source,
            is_one_coming=lambda: source.is_one_coming() or starting(),
            send=GroupSender(groups, lambda pool: DeploymentHandle(pool, context.app_name)),
            policy=start.policy,
            client_id=f"router-{settings.replica}",
            model_hash=start.model_hash,
            wake=self._waker,
            limits=DispatchLimits(group_wait_s=settings.group_wait_s),
        )
        self._service = build_service(
            self._dispatcher, tokenizer, settings, model_folder=start.tokenizer_folder
        )
        self._telemetry = MetricsPublisher(self._service.metrics, DirectoryBoard(directory))
        self._app = create_app(self._service, settings, telemetry=self._telemetry)
        await self._dispatcher.start()
        try:
            await self._dispatcher.settle(start.update_timeout_s)
        except TimeoutError:
            await self._dispatcher.stop()
            raise RuntimeError(
                f"no group of this model was ready within {start.update_timeout_s:g} s, so the old model "
                "stays; `tandem status` says what its groups wait for"
            ) from None
        await self._telemetry.start()
        self._export = start_task(keep_exporting(self._telemetry.own_families), "export of counts to Ray")

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Serve's call for the application, after the constructor."""
        return self._app

    async def __del__(self) -> None:
        """Serve's call when the replica ends; it has let requests finish before."""
        self._service.start_draining()
        await end_tasks(self._export)
        await self._waker.stop()
        await self._starting.stop()
        await self._telemetry.stop()
        await self._dispatcher.stop()
        self._service.close()
