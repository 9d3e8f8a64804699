"""Prompts computed by one group and answered by another: who gets what, and what is told of it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from router.dispatch.dispatcher import SocketDispatcher
from router.dispatch.interface import PairState, Unavailable
from router.routing.policy import PolicyConfig
from router.serving.explain import explanation
from tests.unit.data_plane.fakes import (
    collect,
    expected_tokens,
    request,
    tokens,
    until,
)
from tests.unit.data_plane.pools import LONG, ROUND_ROBIN, Pools, with_pools
from workers.types import RequestId, SamplingParams


async def steady_router(pools: Pools, policy: PolicyConfig | None = None) -> SocketDispatcher:
    """Its clock stands still, so that it keeps the rates it supposes: four tokens a millisecond."""
    return await pools.groups.add_router(policy=policy, clock=lambda: 0.0)


def test_a_long_prompt_is_computed_by_one_group_and_answered_by_another() -> None:
    async def test(pools: Pools) -> None:
        p, d = await pools.add("p"), await pools.add("d")
        router = await steady_router(pools)
        chunks = await collect(router, replace(request("r-0", LONG, max_tokens=20), num_choices=3))
        for choice in range(3):
            assert tokens(chunks, choice) == expected_tokens(LONG, choice, 20)
        assert {chunk.request_id for chunk in chunks} == {"r-0"}
        (prompt,), (answered,) = p.requests, d.requests
        assert prompt.request_id == "r-0+1"
        assert prompt.prompt_token_ids == answered.prompt_token_ids == LONG
        assert (prompt.sampling, prompt.num_choices) == (SamplingParams(max_tokens=0), 1)
        assert prompt.transfer_id is not None and len(bytes.fromhex(prompt.transfer_id)) == 16
        source = answered.kv_source
        assert source is not None and answered.transfer_id is None and prompt.kv_source is None
        address = pools.group("p").address
        assert (source.group_id, source.host, source.port) == ("p", address.host, address.port)
        assert source.transfer_id == prompt.transfer_id
        assert (p.num_computed["r-0+1"], d.num_computed["r-0"]) == (400, 4)
        assert next(chunk.num_cached_tokens for chunk in chunks if chunk.choice == 0) == 0  # as in one pool
        assert p.aborted == d.aborted == d.redirects == []
        counts = router.fetch_counts()
        assert (counts.sources, counts.prefills, counts.redirects) == ({"prefill": 1}, {"computed": 1}, {})
        assert (counts.pulled_tokens, counts.recomputed_tokens) == (396, 0)
        assert router.pairs() == [PairState("p", "d", 1, 0, None, 396 // 4 * 64)]

    with_pools(test)


def test_why_is_explained_with_both_groups() -> None:
    async def test(pools: Pools) -> None:
        await pools.add("p")
        await pools.add("d")
        router = await steady_router(pools)
        await collect(router, request("r-0", LONG))
        (shown,) = explanation(router, "cmpl-r")["prompts"]
        assert shown["taken_by"] == "d"
        assert shown["fetch"] == {
            "source": "p",
            "wanted_tokens": 396,
            "pulled_tokens": 396,
            "prefills": [{"group": "p", "outcome": "computed"}],
        }
        pair, alone = shown["ranked"]
        assert (pair["group"], pair["source"], pair["fetched_tokens"]) == ("d", "p", 396)
        assert (alone["group"], alone["source"], alone["fetched_tokens"]) == ("d", None, 0)
        assert pair["terms_ms"]["source_prefill"] == 100.0
        assert pair["terms_ms"]["transfer"] == pytest.approx(10.0 + 99 * 64 / 1e6)
        assert alone["terms_ms"]["prefill"] == 100.0
        for entry in (pair, alone):
            assert entry["cost_ms"] == pytest.approx(sum(entry["terms_ms"].values()))

    with_pools(test)


def test_what_is_cached_where_it_is_answered_needs_nobody_else() -> None:
    async def test(pools: Pools) -> None:
        p, d = await pools.add("p"), await pools.add("d")
        router = await steady_router(pools)
        await collect(router, request("first", LONG))
        again = await collect(router, request("again", LONG))
        assert again[0].num_cached_tokens == 396
        assert d.requests[1].kv_source is None
        assert len(p.requests) == 1
        decision = router.explain(RequestId("again"))
        assert decision is not None and decision.fetch is None and decision.ranked[0].source is None

    with_pools(test)


def test_tokens_that_the_prefill_group_had_cached_count_as_cached() -> None:
    async def test(pools: Pools) -> None:
        p = await pools.add("p")
        await pools.add("d1")
        await pools.add("d2")
        router = await pools.groups.add_router(policy=ROUND_ROBIN)
        first = await collect(router, request("first", LONG))
        second = await collect(router, request("second", (*LONG[:200], *range(200))))
        assert {group for name, group in pools.groups.sent if name in ("first", "second")} == {"d1", "d2"}
        assert (first[0].num_cached_tokens, second[0].num_cached_tokens) == (0, 200)
        assert p.num_computed["second+1"] == 200

    with_pools(test)


def test_short_prompts_and_those_with_prompt_logprobs_are_computed_where_they_are_answered() -> None:
    async def test(pools: Pools) -> None:
        p, d = await pools.add("p"), await pools.add("d")
        router = await pools.groups.add_router(policy=ROUND_ROBIN)
        scored = request("scored", LONG)
        scored = replace(scored, sampling=replace(scored.sampling, num_prompt_logprobs=0))
        wanted = [request(f"r{n}", LONG[:n]) for n in (1, 3, 4)]
        for asked in (*wanted, scored):
            assert tokens(await collect(router, asked)) == expected_tokens(asked.prompt_token_ids, 0, 3)
        assert p.requests == []
        assert [asked.kv_source for asked in d.requests] == [None] * 4
        await collect(router, request("five", LONG[:5]))  # a full block, and a token to compute
        assert [asked.prompt_token_ids for asked in p.requests] == [LONG[:5]]

    with_pools(test)


def test_a_busy_prefill_group_is_not_waited_for() -> None:
    async def test(pools: Pools) -> None:
        p, d = await pools.add("p"), await pools.add("d")
        router = await steady_router(pools)
        p.is_paused = True
        held = asyncio.create_task(collect(router, request("held", range(2000, 2800))))
        await until(lambda: "held+1" in p.jobs)
        chunks = await collect(router, request("r", LONG))
        assert tokens(chunks) == expected_tokens(LONG, 0, 3)
        assert [asked.request_id for asked in p.requests] == ["held+1"]
        assert d.num_computed["r"] == 400
        p.is_paused = False
        assert tokens(await held) == expected_tokens(range(2000, 2800), 0, 3)

    with_pools(test)


def test_without_a_prefill_group_the_decode_pool_does_all() -> None:
    async def test(pools: Pools) -> None:
        d = await pools.add("d")
        router = await steady_router(pools)
        assert tokens(await collect(router, request("r", LONG))) == expected_tokens(LONG, 0, 3)
        assert d.requests[0].kv_source is None
        assert router.fetch_counts().sources == {"none": 1}

    with_pools(test)


def test_without_a_decode_group_nobody_answers() -> None:
    async def test(pools: Pools) -> None:
        p = await pools.add("p")
        router = await steady_router(pools)
        assert [(state.is_ready, state.can_answer) for state in router.groups()] == [(True, False)]
        with pytest.raises(Unavailable) as refused:
            await collect(router, request("r", LONG))
        assert refused.value.code == "no_healthy_group"
        assert p.requests == []

    with_pools(test)


@pytest.mark.parametrize(
    "facts",
    [
        {"exchanges_kv": False},
        {"model_hash": "other"},
        {"dtype": "int8"},
        {"max_model_len": 399},
        {"num_blocks": 99},
    ],
)
def test_a_prefill_group_that_cannot_help_is_not_asked(facts: dict[str, object]) -> None:
    async def test(pools: Pools) -> None:
        p = await pools.add("p", **facts)
        await pools.add("d")
        router = await pools.groups.add_router(policy=ROUND_ROBIN)
        await collect(router, request("r", LONG))
        assert p.requests == []

    with_pools(test)


def test_three_pools_take_turns() -> None:
    async def test(pools: Pools) -> None:
        engines = [await pools.add(name) for name in ("d", "p", "p2", "u")]
        router = await pools.groups.add_router(policy=ROUND_ROBIN)
        for i in range(4):
            await collect(router, request(f"r{i}", [i, *LONG]))
        by_name = {engine.name: [str(asked.request_id) for asked in engine.requests] for engine in engines}
        assert [len(by_name[name]) for name in ("d", "u", "p", "p2")] == [2, 2, 2, 2]
        assert all(name.endswith("+1") for name in by_name["p"] + by_name["p2"])

    with_pools(test)


def test_a_neighbour_s_cache_is_read_instead_of_computing() -> None:
    async def test(pools: Pools) -> None:
        u1, u2 = await pools.add("u1"), await pools.add("u2")
        router = await steady_router(pools)
        await collect(router, request("first", LONG))
        owner, other = (u1, u2) if u1.requests else (u2, u1)
        await until(lambda: router.index.number(owner.name) == owner.number)
        await until(lambda: not any(state.stats.num_running for state in router.groups()))
        owner.is_paused = True
        busy = asyncio.create_task(collect(router, request("busy", (*LONG, *range(800)))))
        await until(lambda: "busy" in owner.jobs)
        chunks = await collect(router, request("r", LONG))
        assert tokens(chunks) == expected_tokens(LONG, 0, 3)
        (read,) = other.requests
        assert read.kv_source is not None
        assert (read.kv_source.group_id, read.kv_source.transfer_id) == (owner.name, None)
        assert other.num_computed["r"] == 4
        assert chunks[0].num_cached_tokens == 396
        assert [asked.request_id for asked in owner.requests] == ["first", "busy"]
        assert router.fetch_counts().sources == {"none": 2, "neighbour": 1}
        owner.is_paused = False
        await busy

    with_pools(test)


def test_neighbours_are_left_alone_when_pulling_is_off() -> None:
    async def test(pools: Pools) -> None:
        u1, u2 = await pools.add("u1"), await pools.add("u2")
        router = await steady_router(pools, PolicyConfig(pull=False))
        await collect(router, request("first", LONG))
        owner = u1 if u1.requests else u2
        await until(lambda: router.index.number(owner.name) == owner.number)
        await until(lambda: not any(state.stats.num_running for state in router.groups()))
        owner.is_paused = True
        busy = asyncio.create_task(collect(router, request("busy", (*LONG, *range(2800)))))
        await until(lambda: "busy" in owner.jobs)
        await collect(router, request("r", LONG))
        assert all(asked.kv_source is None for engine in (u1, u2) for asked in engine.requests)
        owner.is_paused = False
        await busy

    with_pools(test)
