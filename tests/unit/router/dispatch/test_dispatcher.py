"""Placing requests on groups, and their tokens on the way back."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from router.dispatch.dispatcher import DispatchLimits
from router.routing.policy import PlacementPolicy, PolicyConfig
from tests.unit.data_plane.fakes import (
    BLOCK_SIZE,
    Cluster,
    collect,
    expected_tokens,
    request,
    tokens,
    until,
    with_cluster,
)
from workers.hashing import block_hashes
from workers.types import FinishReason, GroupId, RequestId

A, B = GroupId("a"), GroupId("b")
LONG = tuple(range(100, 140))  # ten blocks


def test_tokens_of_all_choices_arrive_in_order() -> None:
    async def test(groups: Cluster) -> None:
        await groups.add_group("a")
        router = await groups.add_router()
        chunks = await collect(router, request("r", LONG, max_tokens=20, num_choices=3))
        for choice in range(3):
            assert tokens(chunks, choice) == expected_tokens(LONG, choice, 20)
        ends = [(chunk.choice, chunk.finish_reason) for chunk in chunks if chunk.finish_reason]
        assert sorted(ends) == [(choice, FinishReason.LENGTH) for choice in range(3)]
        assert {chunk.request_id for chunk in chunks} == {"r"}
        decision = router.explain(RequestId("r"))
        assert decision is not None
        assert (decision.taken_by, decision.num_attempts, decision.num_prompt_tokens) == (A, 1, 40)

    with_cluster(test)


def test_a_hundred_requests_of_two_routers_over_two_groups() -> None:
    async def test(groups: Cluster) -> None:
        await groups.add_group("a")
        await groups.add_group("b")
        routers = [await groups.add_router(), await groups.add_router()]
        wanted = [request(f"r{i}", [i, 7, 8], max_tokens=1 + i % 7) for i in range(100)]
        answers = await asyncio.gather(*(collect(routers[i % 2], r) for i, r in enumerate(wanted)))
        for asked, chunks in zip(wanted, answers, strict=True):
            assert tokens(chunks) == expected_tokens(asked.prompt_token_ids, 0, asked.sampling.max_tokens)
        real = [group for name, group in groups.sent if not name.startswith("canary")]
        assert len(real) == 100
        assert min(Counter(real).values()) >= 33

    with_cluster(test)


def test_routers_agree_on_what_is_cached_where() -> None:
    async def test(groups: Cluster) -> None:
        a, b = await groups.add_group("a"), await groups.add_group("b")
        first = await groups.add_router()
        for i in range(10):
            await collect(first, request(f"r{i}", [i] * 12))
        second = await groups.add_router()  # comes later: learns the past from snapshots
        for i in range(10, 20):
            await collect(second, request(f"r{i}", [i] * 12))
        a.engine.evict(block_hashes([3] * 12, BLOCK_SIZE)[:1])
        b.engine.evict(block_hashes([4] * 12, BLOCK_SIZE)[:2])
        for router in (first, second):
            await until(lambda: router.index.number(A) == a.engine.number)  # noqa: B023
            await until(lambda: router.index.number(B) == b.engine.number)  # noqa: B023
            assert router.index.blocks(A) == a.engine.cached
            assert router.index.blocks(B) == b.engine.cached
        assert len(a.engine.cached) + len(b.engine.cached) >= 20 * 3 - 3

    with_cluster(test)


def test_a_gap_in_the_log_is_healed_by_a_snapshot() -> None:
    async def test(groups: Cluster) -> None:
        a = await groups.add_group("a")
        router = await groups.add_router()
        await collect(router, request("r", LONG))
        await until(lambda: router.index.blocks(A) == a.engine.cached)
        # The index is an event behind its link: what a lost frame leaves behind.
        router.index._groups[A].number -= 1
        a.engine.store(block_hashes([5] * 8, BLOCK_SIZE))
        await until(lambda: router.index.number(A) == a.engine.number)
        assert router.index.is_usable(A)
        assert router.index.blocks(A) == a.engine.cached

    with_cluster(test)


def test_equal_prompts_follow_the_cache_and_bursts_stay_together() -> None:
    async def test(groups: Cluster) -> None:
        await groups.add_group("a")
        await groups.add_group("b")
        # On a clock that stands no speed is measured, so the costs are those of groups of the usual speed,
        # and with patient limits a busy machine makes nobody try another group.
        router = await groups.add_router(limits=DispatchLimits(), clock=lambda: 0.0)
        one = tuple(range(3000, 4000))
        for i in range(5):  # one after the other
            await collect(router, request(f"s{i}", one, max_tokens=1))
        one_by_one = {group for name, group in groups.sent if name.startswith("s")}
        assert len(one_by_one) == 1
        other = tuple(range(500, 2500))
        await asyncio.gather(*(collect(router, request(f"b{i}", other, max_tokens=1)) for i in range(5)))
        assert len({group for name, group in groups.sent if name.startswith("b")}) == 1

    with_cluster(test)


def test_round_robin_takes_turns() -> None:
    async def test(groups: Cluster) -> None:
        await groups.add_group("a")
        await groups.add_group("b")
        router = await groups.add_router(policy=PolicyConfig(policy=PlacementPolicy.ROUND_ROBIN))
        for i in range(6):
            await collect(router, request(f"s{i}", LONG, max_tokens=1))
        turns = [group for name, group in groups.sent if name.startswith("s")]
        assert turns in ([A, B] * 3, [B, A] * 3)

    with_cluster(test)


def test_leaving_early_frees_the_request_on_the_group() -> None:
    async def test(groups: Cluster) -> None:
        a = await groups.add_group("a")
        router = await groups.add_router()
        stream = router.generate(request("r", max_tokens=10**6, num_choices=4))
        async for chunk in stream:
            assert chunk.request_id == "r"
            break
        await stream.aclose()
        await until(lambda: a.engine.aborted == ["r"])
        await until(lambda: not a.engine.running and a.server.num_requests == 0)

    with_cluster(test)


def test_leaving_before_the_first_token_frees_it_too() -> None:
    async def test(groups: Cluster) -> None:
        a = await groups.add_group("a")
        router = await groups.add_router()
        a.engine.is_paused = True  # it waits in the group's queue
        task = asyncio.create_task(collect(router, request("r", max_tokens=10)))
        await until(lambda: "r" in a.engine.running)
        await asyncio.sleep(0.02)
        task.cancel()
        await until(lambda: a.engine.aborted == ["r"])
        with pytest.raises(asyncio.CancelledError):
            await task

    with_cluster(test)


def test_a_dead_group_spares_the_others_and_its_streams_go_on_there() -> None:
    async def test(groups: Cluster) -> None:
        a = await groups.add_group("a")
        router = await groups.add_router()
        moved = asyncio.create_task(collect(router, request("r", max_tokens=300, num_choices=2)))
        await until(lambda: "r" in a.engine.running)
        a.engine.is_paused = True
        b = await groups.add_group("b")
        await until(lambda: sum(state.is_ready for state in router.groups()) == 2)
        groups.refuse.add("a")
        spared = await collect(router, request("s", max_tokens=5))
        assert tokens(spared) == expected_tokens([1, 2, 3], 0, 5)
        a.engine.step(failure="rank 1 was killed by signal 9")
        chunks = await moved
        for choice in (0, 1):
            assert tokens(chunks, choice) == expected_tokens([1, 2, 3], choice, 300)
        assert [state.is_ready for state in router.groups()] == [False, True]
        assert b.engine.aborted == []

    with_cluster(test)


def test_stopping_the_router_ends_requests_with_an_error() -> None:
    async def test(groups: Cluster) -> None:
        a = await groups.add_group("a")
        router = await groups.add_router()
        task = asyncio.create_task(collect(router, request("r", max_tokens=10**6)))
        await until(lambda: "r" in a.engine.running)
        await router.stop()
        assert (await task)[-1].error_code == "router_stopping"
        await until(lambda: a.server.num_requests == 0)

    with_cluster(test)
