"""Requests that come while no group can take them, and when one is on its way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from router.dispatch.dispatcher import DispatchLimits, SocketDispatcher
from router.dispatch.interface import Unavailable
from tests.unit.data_plane.fakes import (
    FAST,
    SECRET,
    Cluster,
    collect,
    expected_tokens,
    info,
    request,
    tokens,
    until,
    with_cluster,
)

ANSWER = expected_tokens([1, 2, 3], 0, 3)


async def router_of(
    groups: Cluster,
    limits: DispatchLimits,
    *,
    is_one_coming: Callable[[], bool] = lambda: False,
    wake: Callable[[], None] | None = None,
) -> SocketDispatcher:
    router = SocketDispatcher(
        secret=SECRET,
        source=groups.list,
        send=groups.send,
        limits=limits,
        model_hash="00",
        is_one_coming=is_one_coming,
        wake=wake,
    )
    await router.start()
    groups.stack.push_async_callback(router.stop)
    return router


async def refused(router: SocketDispatcher) -> tuple[str, float]:
    """The code, and after how long."""
    began_s = time.monotonic()
    with pytest.raises(Unavailable) as caught:
        await collect(router, request("r"))
    return caught.value.code, time.monotonic() - began_s


def test_a_request_waits_for_a_group_that_is_being_started() -> None:
    async def test(groups: Cluster) -> None:
        router = await router_of(groups, replace(FAST, start_wait_s=5.0), is_one_coming=lambda: True)
        answer = asyncio.create_task(collect(router, request("r")))
        available = asyncio.create_task(router.available())
        await asyncio.sleep(0.2)
        assert not answer.done() and not available.done()
        await groups.add_group("a")
        await available
        assert tokens(await answer) == ANSWER
        decision = router.explain(request("r").request_id)
        assert decision is not None and decision.num_attempts == 1

    with_cluster(test)


def test_one_that_has_been_started_and_gives_no_token_yet_is_waited_for() -> None:
    async def test(groups: Cluster) -> None:
        a = await groups.add_group("a", steps=False)
        router = await router_of(groups, replace(FAST, start_wait_s=5.0))
        await until(lambda: len(a.engine.submitted) == 1)  # the canary
        answer = asyncio.create_task(collect(router, request("r")))
        await asyncio.sleep(0.2)
        assert not answer.done()
        a.engine.start()
        assert tokens(await answer) == ANSWER

    with_cluster(test)


def test_one_that_is_being_started_is_waited_for_when_those_there_do_not_take_it() -> None:
    """One group hangs while another is rebuilt."""

    async def test(groups: Cluster) -> None:
        await groups.add_group("a")
        coming = [True]
        router = await router_of(groups, replace(FAST, start_wait_s=5.0), is_one_coming=lambda: coming[0])
        await until(lambda: any(state.is_ready for state in router.groups()))
        groups.refuse.add("a")
        answer = asyncio.create_task(collect(router, request("r")))
        await asyncio.sleep(0.2)
        assert not answer.done()
        await groups.add_group("b")
        assert tokens(await answer) == ANSWER
        groups.refuse.add("b")
        coming[0] = False
        code, waited_s = await refused(router)
        assert code == "no_healthy_group" and waited_s < 1.0

    with_cluster(test)


def test_it_waits_no_longer_than_its_limit() -> None:
    async def test(groups: Cluster) -> None:
        router = await router_of(groups, replace(FAST, start_wait_s=0.3), is_one_coming=lambda: True)
        code, waited_s = await refused(router)
        assert code == "no_ready_group" and 0.3 <= waited_s < 3.0

    with_cluster(test)


def test_a_group_that_leaves_may_have_a_successor_for_a_moment() -> None:
    async def test(groups: Cluster) -> None:
        a = await groups.add_group("a")
        router = await router_of(groups, replace(FAST, start_wait_s=5.0, successor_s=0.6))
        assert tokens(await collect(router, request("first"))) == ANSWER
        await asyncio.sleep(0.7)  # since the start of the router
        groups.listed = [replace(a.address, is_draining=True)]
        await until(lambda: not any(state.is_ready for state in router.groups()))
        answer = asyncio.create_task(collect(router, request("r")))
        await asyncio.sleep(0.1)
        await groups.add_group("b")
        assert tokens(await answer) == ANSWER
        groups.listed = []
        await until(lambda: not any(state.is_ready for state in router.groups()))
        code, waited_s = await refused(router)
        assert code == "no_ready_group" and 0.4 < waited_s < 3.0
        code, waited_s = await refused(router)
        assert code == "no_healthy_group" and waited_s < 0.4

    with_cluster(test)


def test_a_group_leaves_once_though_it_finishes_what_it_has() -> None:
    async def test(groups: Cluster) -> None:
        a = await groups.add_group("a")
        router = await router_of(groups, FAST)
        await until(lambda: any(state.is_ready for state in router.groups()))
        groups.listed = [replace(a.address, is_draining=True)]
        await until(lambda: not any(state.is_ready for state in router.groups()))
        await asyncio.sleep(0.3)
        await a.server.stop("the group was stopped", is_planned=True)
        await until(lambda: not router._table.links())
        await asyncio.sleep(0.02)
        assert router._table.since_left_s > 0.3

    with_cluster(test)


def test_groups_of_another_model_have_no_successor_of_ours() -> None:
    async def test(groups: Cluster) -> None:
        await groups.add_group("a", described=replace(info("a"), model_hash="another"))
        limits = replace(FAST, start_wait_s=5.0, successor_s=5.0)
        router = await router_of(groups, limits, is_one_coming=lambda: True)
        await until(lambda: router._table.is_superseded)
        code, waited_s = await refused(router)
        assert code == "no_healthy_group" and waited_s < 1.0

    with_cluster(test)


def test_pools_at_zero_are_woken_again_and_again() -> None:
    async def test(groups: Cluster) -> None:
        woken: list[None] = []
        router = await router_of(groups, replace(FAST, group_wait_s=5.0), wake=lambda: woken.append(None))
        answer = asyncio.create_task(collect(router, request("r")))
        await until(lambda: len(woken) >= 3)
        await groups.add_group("a")
        assert tokens(await answer) == ANSWER

    with_cluster(test)


def test_stopping_the_router_ends_waiting_too() -> None:
    async def test(groups: Cluster) -> None:
        a = await groups.add_group("a")
        limits = replace(FAST, start_wait_s=60.0, move_wait_s=60.0)
        router = await router_of(groups, limits, is_one_coming=lambda: True)
        moving = asyncio.create_task(collect(router, request("r", [5], 10**6)))
        await until(lambda: a.engine.num_steps > 20)
        groups.listed = []
        a.engine.step(failure="rank 0 was killed")
        await until(lambda: not any(state.is_ready for state in router.groups()))
        waiting = asyncio.create_task(collect(router, request("s")))
        await asyncio.sleep(0.1)
        await router.stop()
        async with asyncio.timeout(2):
            assert (await moving)[-1].error_code == "group_failed"
            with pytest.raises(Unavailable):
                await waiting

    with_cluster(test)


def test_a_stream_past_its_drain_goes_on_in_a_group_that_is_being_started() -> None:
    async def test(groups: Cluster) -> None:
        a = await groups.add_group("a")
        limits = replace(FAST, stopped_wait_s=0.1, move_wait_s=5.0)
        router = await router_of(groups, limits, is_one_coming=lambda: True)
        answer = asyncio.create_task(collect(router, request("r", [5], 600)))
        await until(lambda: a.engine.num_steps > 20)
        groups.listed = []
        await a.server.stop("the group was stopped", is_planned=True)
        await asyncio.sleep(0.3)
        await groups.add_group("b")
        assert tokens(await answer) == expected_tokens([5], 0, 600)

    with_cluster(test)


def test_a_stream_past_its_drain_ends_once_no_other_group_is_being_started() -> None:
    async def test(groups: Cluster) -> None:
        a = await groups.add_group("a")
        coming = [True]
        limits = replace(FAST, stopped_wait_s=0.1, move_wait_s=5.0)
        router = await router_of(groups, limits, is_one_coming=lambda: coming[0])
        answer = asyncio.create_task(collect(router, request("r", [5], 10**6)))
        await until(lambda: a.engine.num_steps > 20)
        groups.listed = []
        await a.server.stop("the group was stopped", is_planned=True)
        await asyncio.sleep(0.3)
        assert not answer.done()
        coming[0] = False
        error = (await answer)[-1].error or ""
        assert error.startswith("worker group a was stopped: the group was stopped; no other group could go")

    with_cluster(test)
