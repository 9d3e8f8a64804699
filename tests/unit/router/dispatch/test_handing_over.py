"""Handing a request to a group that takes it late, not at all, twice, or is not the one asked."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from router.dispatch.interface import Unavailable
from tests.unit.data_plane.fakes import (
    FAST,
    Cluster,
    collect,
    expected_tokens,
    request,
    tokens,
    until,
    with_cluster,
)
from workers.engine.loop import StepOutput
from workers.types import FinishReason, GenerateRequest, GroupId, GroupStats, RequestId, TokenChunk

A, B = GroupId("a"), GroupId("b")
LONG = tuple(range(100, 140))  # ten blocks


def test_leaving_while_the_request_is_handed_over_frees_it_wherever_it_arrives() -> None:
    async def test(groups: Cluster) -> None:
        a = await groups.add_group("a")
        go_on = asyncio.Event()

        async def slow_send(order: Sequence[GroupId], client_id: str, wanted: GenerateRequest) -> GroupId:
            if wanted.request_id == "r":
                await go_on.wait()
            return await groups.send(order, client_id, wanted)

        router = await groups.add_router(send=slow_send)
        task = asyncio.create_task(collect(router, request("r", max_tokens=10**6)))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.02)  # the ABORT is there before the SUBMIT
        go_on.set()
        await asyncio.sleep(0.05)
        assert "r" not in a.engine.running
        assert a.server.num_requests == 0

    with_cluster(test)


def test_a_group_that_takes_nothing_is_passed_over() -> None:
    async def test(groups: Cluster) -> None:
        await groups.add_group("a")
        await groups.add_group("b")
        router = await groups.add_router()
        await collect(router, request("warm", LONG, max_tokens=1))
        owner = groups.sent[-1][1]
        groups.refuse.add(owner)
        chunks = await collect(router, request("r", LONG, max_tokens=4))
        assert tokens(chunks) == expected_tokens(LONG, 0, 4)
        assert {chunk.request_id for chunk in chunks} == {"r"}
        assert groups.sent[-1] == ("r~2", B if owner == A else A)
        decision = router.explain(RequestId("r"))
        assert decision is not None and decision.num_attempts == 2

    with_cluster(test)


def test_without_a_group_the_answer_is_unavailable_at_once() -> None:
    async def test(groups: Cluster) -> None:
        router = await groups.add_router()
        with pytest.raises(Unavailable) as refused:
            await collect(router, request("r"))
        assert refused.value.code == "no_healthy_group"
        await groups.add_group("a")
        await until(lambda: any(state.is_ready for state in router.groups()))
        groups.refuse.add("a")
        with pytest.raises(Unavailable, match="1 did not take it") as refused:
            await collect(router, request("r2"))
        assert refused.value.code == "no_healthy_group"
        assert router.groups()[0].stats.num_running == 0
        assert router.route_counts().retries == {"refused": 1}

    with_cluster(test)


def test_a_group_that_hangs_in_taking_a_request_loses_it_to_another() -> None:
    async def test(groups: Cluster) -> None:
        a, b = await groups.add_group("a"), await groups.add_group("b")
        go_on = asyncio.Event()
        first: list[GroupId] = []

        async def hanging(order: Sequence[GroupId], client_id: str, wanted: GenerateRequest) -> GroupId:
            if wanted.request_id == "r":
                first.append(order[0])
                await go_on.wait()
            return await groups.send(order, client_id, wanted)

        limits = replace(FAST, send_timeout_s=0.1)
        router = await groups.add_router(send=hanging, limits=limits)
        chunks = await collect(router, request("r", max_tokens=4))
        assert tokens(chunks) == expected_tokens([1, 2, 3], 0, 4)
        assert groups.sent[-1] == ("r~2", B if first == [A] else A)
        go_on.set()  # the first attempt arrives after all: nobody wants it any more
        await asyncio.sleep(0.05)
        for group in (a, b):
            assert group.server.num_requests == 0
            assert not group.engine.running

    with_cluster(test)


def test_tokens_of_two_attempts_never_mix() -> None:
    async def test(groups: Cluster) -> None:
        a, b = await groups.add_group("a", steps=False), await groups.add_group("b", steps=False)

        async def both(order: Sequence[GroupId], client_id: str, wanted: GenerateRequest) -> GroupId:
            if wanted.request_id.startswith("canary"):
                name = await groups.send(order, client_id, wanted)
                groups.groups[name].engine.step()
                return name
            for group in (a, b):  # a control call that was retried although the first one had arrived
                await group.front.submit(client_id, wanted)
            return order[0]

        router = await groups.add_router(send=both)
        task = asyncio.create_task(collect(router, request("r", max_tokens=3)))
        await until(lambda: "r" in a.engine.running and "r" in b.engine.running)
        await asyncio.sleep(0.02)
        a.engine.step()
        b.engine.step()
        await until(lambda: len(a.engine.aborted) + len(b.engine.aborted) == 1)
        for group in (a, b):
            group.engine.step()
            group.engine.step()
        chunks = await task
        assert tokens(chunks) == expected_tokens([1, 2, 3], 0, 3)

    with_cluster(test)


def test_a_group_that_was_not_in_the_ranking_may_take_the_request() -> None:
    async def test(groups: Cluster) -> None:
        await groups.add_group("a")
        b = await groups.add_group("b")

        async def elsewhere(order: Sequence[GroupId], client_id: str, wanted: GenerateRequest) -> GroupId:
            is_canary = wanted.request_id.startswith("canary")
            return await groups.send(order if is_canary else [B], client_id, wanted)

        router = await groups.add_router(send=elsewhere)
        groups.listed[1] = replace(b.address, is_draining=True)
        await until(lambda: sum(state.is_ready for state in router.groups()) == 1)
        b.engine.is_paused = True  # the answer of `send` comes before the first token
        task = asyncio.create_task(collect(router, request("r", max_tokens=5)))
        await until(lambda: "r" in b.engine.running)
        loads = {name: link.load for name, link in router._table.links().items()}
        await until(lambda: (loads[A].num_requests, loads[B].num_requests) == (0, 1))
        b.engine.is_paused = False
        assert tokens(await task) == expected_tokens([1, 2, 3], 0, 5)
        assert [loads[name].num_requests for name in (A, B)] == [0, 0]
        assert [loads[name].view(0.0, 0.0).charged_tokens for name in (A, B)] == [0, 0]
        decision = router.explain(RequestId("r"))
        assert decision is not None and decision.taken_by == B
        assert [choice.group_id for choice in decision.ranked] == [A]

    with_cluster(test)


def test_a_connection_made_again_while_a_request_is_handed_over_sends_it_elsewhere() -> None:
    async def test(groups: Cluster) -> None:
        await groups.add_group("a")
        b = await groups.add_group("b")
        b.engine.is_paused = False
        is_taken, go_on = asyncio.Event(), asyncio.Event()

        async def slow_answer(order: Sequence[GroupId], client_id: str, wanted: GenerateRequest) -> GroupId:
            if wanted.request_id != "r":
                return await groups.send(order, client_id, wanted)
            b.engine.is_paused = True
            name = await groups.send([B], client_id, wanted)
            is_taken.set()
            await go_on.wait()
            return name

        router = await groups.add_router(send=slow_answer, limits=replace(FAST, send_timeout_s=5.0))
        groups.listed[1] = replace(b.address, is_draining=True)  # takes it without being in the ranking
        await until(lambda: sum(state.is_ready for state in router.groups()) == 1)
        task = asyncio.create_task(collect(router, request("r", max_tokens=5)))
        await is_taken.wait()
        link = router._table.links()[B]
        link.close("the network is gone")
        await until(lambda: router._table.links().get(B, link) is not link)
        await until(lambda: "r" in b.engine.aborted)  # the group has ended it with the connection
        go_on.set()
        assert tokens(await task) == expected_tokens([1, 2, 3], 0, 5)

    with_cluster(test)


def test_a_refusal_teaches_nothing_of_the_speed_of_a_group() -> None:
    async def test(groups: Cluster) -> None:
        a = await groups.add_group("a")
        router = await groups.add_router()
        a.engine.is_paused = True
        task = asyncio.create_task(collect(router, request("r", range(1000))))
        await until(lambda: "r" in a.engine.running)
        refusal = TokenChunk(
            request_id=RequestId("r"), choice=0, finish_reason=FinishReason.ERROR, error_code="queue_full"
        )
        a.server.on_output(StepOutput(chunks=(refusal,), events=(), stats=GroupStats()))
        assert await task == [refusal]
        assert router._table.links()[A].load.view(0.0, 0.0).prefill_tokens_per_s is None

    with_cluster(test)
