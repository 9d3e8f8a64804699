"""Two groups, one request: one of them dies, or both, perhaps of the prompt."""

from __future__ import annotations

import asyncio

import pytest

from tests.unit.data_plane.fakes import collect, expected_tokens, request, tokens, until
from tests.unit.data_plane.pools import LONG, RIGHT, Pools, outcomes, quiet, started, with_pools
from workers.types import RequestId


@pytest.mark.parametrize("is_running", [False, True])
def test_a_prefill_group_that_dies_may_have_died_of_the_prompt(is_running: bool) -> None:
    async def test(pools: Pools) -> None:
        router, (d, p1, p2) = await started(pools, "d", "p1", "p2")
        p1.is_paused = p2.is_paused = True
        task = asyncio.create_task(collect(router, request("r", LONG)))
        await until(lambda: "r+1" in p2.jobs)
        if is_running:
            await until(lambda: "r" in d.jobs)
        await pools.kill("p2")
        assert tokens(await task) == RIGHT
        assert outcomes(router) == [("p2", "crashed")]
        assert d.redirects == [("r", None)]
        assert d.num_computed["r"] == 400
        assert p1.requests == []
        assert quiet(d)

    with_pools(test)


def test_one_prefill_group_refuses_and_the_other_dies() -> None:
    async def test(pools: Pools) -> None:
        router, (d, p1, _) = await started(pools, "d", "p1", "p2")
        p1.is_paused = True
        pools.groups.refuse.add("p2")
        task = asyncio.create_task(collect(router, request("r", LONG)))
        await until(lambda: "r+2" in p1.jobs)
        await pools.kill("p1")
        await pools.kill("p2")
        assert tokens(await task) == RIGHT
        assert d.redirects == [("r", "p1"), ("r", None)]
        assert d.num_computed["r"] == 400
        assert tokens(await collect(router, request("s", (7, *LONG)))) == expected_tokens((7, *LONG), 0, 3)
        assert outcomes(router, "s") is None

    with_pools(test)


def test_a_prompt_that_kills_groups_takes_one_prefill_group_and_two_others_with_it() -> None:
    async def test(pools: Pools) -> None:
        router, (d1, d2, p1, p2) = await started(pools, "d1", "d2", "p1", "p2")
        for engine in (d1, d2, p1, p2):
            engine.is_paused = True
        task = asyncio.create_task(collect(router, request("r", LONG)))
        await until(lambda: "r+1" in p2.jobs and "r" in d2.jobs)
        await pools.kill("p2")
        await until(lambda: d2.redirects == [("r", None)])
        await pools.kill("d2")
        await until(lambda: "r~2" in d1.jobs)
        assert d1.jobs[RequestId("r~2")].source is None
        await pools.kill("d1")
        assert [chunk.error_code for chunk in await task] == ["request_quarantined"]
        assert p1.requests == []

    with_pools(test)


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_decode_group_that_dies_takes_the_prompt_along(has_begun: bool) -> None:
    async def test(pools: Pools) -> None:
        router, (d, p) = await started(pools, "d", "p")
        p.is_paused = not has_begun
        task = asyncio.create_task(collect(router, request("r", LONG, max_tokens=10**6)))
        await until(lambda: "r" in d.jobs and (has_begun or "r+1" in p.jobs))
        if has_begun:
            await until(lambda: d.jobs[RequestId("r")].num_done > 0)
        await pools.kill("d")
        assert (await task)[-1].error_code == "group_failed"
        await until(lambda: p.aborted == ([] if has_begun else ["r+1"]) and quiet(p))

    with_pools(test)


def test_a_source_that_has_gone_leaves_no_pair_behind() -> None:
    async def test(pools: Pools) -> None:
        router, (d, _) = await started(pools, "d", "p")
        d.gives_up = d.is_paused = True
        task = asyncio.create_task(collect(router, request("r", LONG)))
        await until(lambda: outcomes(router) == [("p", "computed")])
        await pools.kill("p")
        await until(lambda: sum(state.is_ready for state in router.groups()) == 1)
        d.is_paused = False
        assert tokens(await task) == RIGHT
        assert router.fetch_counts().recomputed_tokens == 396
        assert router.pairs() == []

    with_pools(test)


def test_both_die() -> None:
    async def test(pools: Pools) -> None:
        router, (d, p) = await started(pools, "d", "p")
        d.is_paused = p.is_paused = True
        task = asyncio.create_task(collect(router, request("r", LONG)))
        await until(lambda: "r" in d.jobs and "r+1" in p.jobs)
        await pools.kill("p")
        await pools.kill("d")
        assert [chunk.error_code for chunk in await task] == ["group_failed"]
        await until(lambda: not any(state.is_ready for state in router.groups()))

    with_pools(test)
