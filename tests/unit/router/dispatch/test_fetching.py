"""Two groups, one request: refusals, deaths and departures at every point between them. Whatever happens to
the prefill group, the answer is what it would have been."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.unit.data_plane.fakes import (
    FAST,
    collect,
    expected_tokens,
    request,
    tokens,
    until,
)
from tests.unit.data_plane.pools import LONG, RIGHT, ROUND_ROBIN, Pools, outcomes, quiet, started, with_pools
from workers.engine.loop import StepOutput
from workers.types import (
    FinishReason,
    GenerateRequest,
    GroupId,
    GroupStats,
    RequestId,
    TokenChunk,
    error_chunk,
)


def test_a_prefill_group_that_refuses_is_replaced_by_another() -> None:
    async def test(pools: Pools) -> None:
        router, (d, p1, p2) = await started(pools, "d", "p1", "p2")
        pools.groups.refuse.add("p2")
        assert tokens(await collect(router, request("r", LONG))) == RIGHT
        assert outcomes(router) == [("p2", "refused"), ("p1", "computed")]
        assert d.redirects == [("r", "p1")]
        assert [asked.request_id for asked in p1.requests] == ["r+2"]
        assert p1.requests[0].transfer_id != d.requests[0].kv_source.transfer_id
        assert d.num_computed["r"] == 4
        counts = router.fetch_counts()
        assert counts.prefills == {"refused": 1, "computed": 1}
        assert counts.redirects == {"prefill": 1}
        assert quiet(d, p1, p2)

    with_pools(test)


def test_when_all_refuse_the_decode_group_computes() -> None:
    async def test(pools: Pools) -> None:
        router, (d, *_) = await started(pools, "d", "p1", "p2")
        pools.groups.refuse |= {"p1", "p2"}
        chunks = await collect(router, request("r", LONG))
        assert tokens(chunks) == RIGHT
        assert chunks[0].num_cached_tokens == 0
        assert outcomes(router) == [("p2", "refused"), ("p1", "refused")]
        assert d.redirects == [("r", "p1"), ("r", None)]
        assert d.num_computed["r"] == 400
        counts = router.fetch_counts()
        assert counts.redirects == {"prefill": 1, "none": 1}
        assert (counts.pulled_tokens, counts.recomputed_tokens) == (0, 396)
        decision = router.explain(RequestId("r"))
        assert decision is not None and decision.fetch is not None and decision.fetch.source is None

    with_pools(test)


def test_no_more_prefill_groups_are_asked_than_attempts_are_allowed() -> None:
    async def test(pools: Pools) -> None:
        names = ("d", "p1", "p2", "p3", "p4")
        d, *_ = [await pools.add(name) for name in names]
        router = await pools.groups.add_router(policy=ROUND_ROBIN, limits=replace(FAST, max_attempts=2))
        pools.groups.refuse |= {"p1", "p2", "p3", "p4"}
        assert tokens(await collect(router, request("r", LONG))) == RIGHT
        assert len(outcomes(router) or []) == 2
        assert d.redirects[-1] == ("r", None)

    with_pools(test)


@pytest.mark.parametrize("code", ["queue_full", "kv_pool_too_small"])
def test_a_prefill_group_that_cannot_is_replaced(code: str) -> None:
    async def test(pools: Pools) -> None:
        router, (_, _, p2) = await started(pools, "d", "p1", "p2")
        p2.is_paused = True
        task = asyncio.create_task(collect(router, request("r", LONG)))
        await until(lambda: "r+1" in p2.jobs)
        del p2.jobs[RequestId("r+1")]
        refusal = error_chunk(RequestId("r+1"), 0, code, "no")
        pools.group("p2").server.on_output(StepOutput(chunks=(refusal,), events=(), stats=GroupStats()))
        assert tokens(await task) == RIGHT
        assert outcomes(router) == [("p2", "failed"), ("p1", "computed")]
        assert router.fetch_counts().prefills == {"failed": 1, "computed": 1}

    with_pools(test)


def test_a_source_that_fails_before_the_decode_group_has_the_request_is_told_later() -> None:
    async def test(pools: Pools) -> None:
        d, p = await pools.add("d"), await pools.add("p")
        go_on = asyncio.Event()

        async def send(order: Sequence[GroupId], client_id: str, wanted: GenerateRequest) -> GroupId:
            if wanted.request_id == "r":
                await go_on.wait()
            return await pools.groups.send(order, client_id, wanted)

        router = await pools.groups.add_router(policy=ROUND_ROBIN, send=send)
        pools.groups.refuse.add("p")
        task = asyncio.create_task(collect(router, request("r", LONG)))
        await until(lambda: router.fetch_counts().redirects == {"none": 1})
        assert d.jobs == {}
        go_on.set()
        assert tokens(await task) == RIGHT
        assert d.redirects == [("r", None)]
        assert p.requests == []

    with_pools(test)


def test_a_decode_group_that_refuses_is_replaced_and_its_prompt_given_up() -> None:
    async def test(pools: Pools) -> None:
        router, (d1, d2, p) = await started(pools, "d1", "d2", "p")
        p.is_paused = True
        pools.groups.refuse.add("d2")
        task = asyncio.create_task(collect(router, request("r", LONG)))
        await until(lambda: "r~2+1" in p.jobs)
        p.is_paused = False
        assert tokens(await task) == RIGHT
        assert (d1.num_computed["r~2"], len(d2.requests)) == (4, 0)
        decision = router.explain(RequestId("r"))
        assert decision is not None and (decision.taken_by, decision.num_attempts) == ("d1", 2)
        assert outcomes(router) == [("p", "computed")]
        await until(lambda: quiet(d1, d2, p))
        assert "r+1" not in p.num_computed

    with_pools(test)


def test_a_decode_group_that_refuses_aloud_lets_the_prefill_group_go() -> None:
    async def test(pools: Pools) -> None:
        router, (d, p) = await started(pools, "d", "p")
        d.is_paused = p.is_paused = True
        task = asyncio.create_task(collect(router, request("r", LONG)))
        await until(lambda: "r" in d.jobs and "r+1" in p.jobs)
        refusal = error_chunk(RequestId("r"), 0, "queue_full", "no")
        pools.group("d").server.on_output(StepOutput(chunks=(refusal,), events=(), stats=GroupStats()))
        assert [chunk.error_code for chunk in await task] == ["queue_full"]
        await until(lambda: p.aborted == ["r+1"])
        assert outcomes(router) == [("p", "cancelled")]

    with_pools(test)


def test_a_prefill_group_that_drains_gets_nothing_new() -> None:
    async def test(pools: Pools) -> None:
        router, (d, p) = await started(pools, "d", "p")
        pools.groups.listed[1] = replace(pools.group("p").address, is_draining=True)
        await until(lambda: sum(state.is_ready for state in router.groups()) == 1)
        assert tokens(await collect(router, request("r", LONG))) == RIGHT
        assert p.requests == [] and d.requests[0].kv_source is None

    with_pools(test)


# ---- the client leaves


@pytest.mark.parametrize("point", ["at once", "handed over", "computed", "first token"])
def test_a_client_that_leaves_frees_both_groups(point: str) -> None:
    async def test(pools: Pools) -> None:
        router, (d, p) = await started(pools, "d", "p")
        d.is_paused = point != "first token"
        p.is_paused = point in ("at once", "handed over")
        stream = router.generate(request("r", LONG, max_tokens=10**6))
        reading = asyncio.create_task(anext(stream))
        if point == "at once":
            await asyncio.sleep(0)
        elif point == "handed over":
            await until(lambda: "r" in d.jobs and "r+1" in p.jobs)
        elif point == "computed":
            await until(lambda: outcomes(router) == [("p", "computed")])
        else:
            await reading
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await stream.aclose()
        d.is_paused = p.is_paused = False
        await asyncio.sleep(0.03)
        await until(lambda: quiet(d, p))
        for name in ("d", "p"):
            assert pools.group(name).server.num_requests == 0
        if point == "handed over":
            assert (d.aborted, p.aborted) == (["r"], ["r+1"])
            assert router.fetch_counts().prefills == {"cancelled": 1}
        if point in ("computed", "first token"):
            assert (d.aborted, p.aborted) == (["r"], [])
        assert router._fetcher._tasks == set()

    with_pools(test)


def test_leaving_while_both_are_handed_over_frees_them_wherever_they_arrive() -> None:
    async def test(pools: Pools) -> None:
        d, p = await pools.add("d"), await pools.add("p")
        go_on = asyncio.Event()

        async def send(order: Sequence[GroupId], client_id: str, wanted: GenerateRequest) -> GroupId:
            if wanted.request_id.startswith("r"):
                await go_on.wait()
            return await pools.groups.send(order, client_id, wanted)

        router = await pools.groups.add_router(policy=ROUND_ROBIN, send=send)
        d.is_paused = p.is_paused = True
        task = asyncio.create_task(collect(router, request("r", LONG)))
        await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(0.02)  # the ABORTs are there before the SUBMITs
        go_on.set()
        await asyncio.sleep(0.05)
        assert quiet(d, p)
        assert pools.group("d").server.num_requests == pools.group("p").server.num_requests == 0

    with_pools(test)


def test_stopping_the_router_ends_both_sides() -> None:
    async def test(pools: Pools) -> None:
        router, (d, p) = await started(pools, "d", "p")
        p.is_paused = True
        task = asyncio.create_task(collect(router, request("r", LONG)))
        await until(lambda: "r" in d.jobs and "r+1" in p.jobs)
        await router.stop()
        assert (await task)[-1].error_code == "router_stopping"
        await until(lambda: quiet(d, p))

    with_pools(test)


# ---- late, double and odd answers


def test_a_decode_group_that_gives_up_needs_the_prefill_group_no_more() -> None:
    async def test(pools: Pools) -> None:
        router, (d, p) = await started(pools, "d", "p")
        p.is_paused = True
        task = asyncio.create_task(collect(router, request("r", LONG, max_tokens=10**6)))
        await until(lambda: "r" in d.jobs and "r+1" in p.jobs)
        d.gives_up = True
        await until(lambda: p.aborted == ["r+1"])
        assert outcomes(router) == [("p", "overtaken")]
        assert d.num_computed["r"] == 400 and d.redirects == []
        assert router.fetch_counts().recomputed_tokens == 396
        p.is_paused = False
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: quiet(d, p))

    with_pools(test)


def test_late_and_repeated_answers_of_the_prefill_group_change_nothing() -> None:
    async def test(pools: Pools) -> None:
        router, (d, _) = await started(pools, "d", "p")
        d.is_paused = True
        task = asyncio.create_task(collect(router, request("r", LONG, max_tokens=20)))
        await until(lambda: outcomes(router) == [("p", "computed")])
        name = RequestId("r+1")
        again = TokenChunk(request_id=name, choice=0, finish_reason=FinishReason.LENGTH, num_cached_tokens=4)
        late = (again, again, replace(again, token_ids=(1,)), error_chunk(name, 0, "queue_full", "no"))
        link = router._table.links()[GroupId("p")]
        router.on_chunks(link, late)
        router.on_chunks(link, [replace(again, request_id=RequestId("r"))])  # not its request
        d.is_paused = False
        chunks = await task
        assert tokens(chunks) == expected_tokens(LONG, 0, 20)
        assert chunks[0].num_cached_tokens == 0
        assert outcomes(router) == [("p", "computed")]
        assert router.fetch_counts().prefills == {"computed": 1}
        assert d.redirects == []
        assert tokens(await collect(router, request("s", (1, *LONG)))) == expected_tokens((1, *LONG), 0, 3)

    with_pools(test)


def test_a_pair_between_which_nothing_comes_is_left_alone_for_a_while() -> None:
    async def test(pools: Pools) -> None:
        router, (d, p) = await started(pools, "d", "p")
        p.leave()  # the router reaches it, the decode group does not
        d.gives_up = True
        for i in range(3):
            d.is_paused = True
            task = asyncio.create_task(collect(router, request(f"r{i}", (i, *LONG))))
            name = RequestId(f"r{i}")
            if i < 2:
                await until(lambda: outcomes(router, name) == [("p", "computed")])  # noqa: B023
            d.is_paused = False
            assert tokens(await task) == expected_tokens((i, *LONG), 0, 3)
        assert [asked.kv_source is None for asked in d.requests] == [False, False, True]
        assert [state[2:4] for state in router.pairs()] == [(0, 2)]
        assert router.fetch_counts().recomputed_tokens == 2 * 400

    with_pools(test)
