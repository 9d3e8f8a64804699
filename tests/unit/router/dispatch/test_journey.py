"""Requests whose group ends go on in another one, with the tokens they would have had."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

from router.dispatch.dispatcher import SocketDispatcher
from tests.unit.data_plane.fakes import (
    Cluster,
    FakeGroup,
    collect,
    expected_tokens,
    request,
    tokens,
    until,
    with_cluster,
)
from workers.types import FinishReason, RequestId, SamplingParams, TokenChunk

POISON = 13


def ends(chunks: list[TokenChunk]) -> list[tuple[int, FinishReason | None, str | None]]:
    return [(chunk.choice, chunk.finish_reason, chunk.error_code) for chunk in chunks if chunk.finish_reason]


def both_ready(router: SocketDispatcher) -> bool:
    return sum(state.is_ready for state in router.groups()) == 2


def test_a_stream_goes_on_in_another_group() -> None:
    async def test(groups: Cluster) -> None:
        a = await groups.add_group("a")
        router = await groups.add_router()
        answers = [asyncio.create_task(collect(router, request(f"r{i}", [i], 400, 2))) for i in range(5)]
        await until(lambda: len(a.engine.running) == 5 and a.engine.num_steps > 20)
        b = await groups.add_group("b")
        await until(lambda: both_ready(router))
        a.engine.step(failure="rank 1 was killed by signal 9")
        for i, answer in enumerate(answers):
            chunks = await answer
            for choice in (0, 1):
                assert tokens(chunks, choice) == expected_tokens([i], choice, 400)
            assert sorted(ends(chunks)) == [(c, FinishReason.LENGTH, None) for c in (0, 1)]
            assert {chunk.request_id for chunk in chunks} == {f"r{i}"}
        assert len(b.engine.submitted) == 5 + 1  # and the canary
        assert router.move_counts() == Counter(moved=5)
        decision = router.explain(RequestId("r3"))
        assert decision is not None and (decision.taken_by, decision.num_moves) == ("b", 1)

    with_cluster(test)


def test_a_group_that_is_told_to_end_costs_its_requests_nothing() -> None:
    async def test(groups: Cluster) -> None:
        old = await groups.add_group("a")
        router = await groups.add_router()
        answer = asyncio.create_task(collect(router, request("r", [5], 600)))
        for name in ("b", "c", "d"):
            await until(lambda: bool(old.engine.running))  # noqa: B023
            new = await groups.add_group(name)
            await until(lambda: both_ready(router))
            groups.listed = [new.address]
            await old.server.stop("the group was stopped", is_planned=True)
            old = new
        chunks = await answer
        assert tokens(chunks) == expected_tokens([5], 0, 600)
        assert ends(chunks) == [(0, FinishReason.LENGTH, None)]

    with_cluster(test)


def test_one_that_waits_in_the_queue_of_a_dead_group_is_sent_again_as_it_was() -> None:
    async def test(groups: Cluster) -> None:
        a = await groups.add_group("a")
        router = await groups.add_router()
        a.engine.is_paused = True
        sampling = SamplingParams(max_tokens=7, num_prompt_logprobs=1)
        wanted = replace(request("r", [5]), sampling=sampling)
        answer = asyncio.create_task(collect(router, wanted))
        await until(lambda: "r" in a.engine.running)
        b = await groups.add_group("b")
        await until(lambda: both_ready(router))
        b.engine.is_paused = True
        a.engine.running.clear()
        a.engine.step(failure="gone")
        await until(lambda: bool(b.engine.running))
        (again,) = b.engine.running.values()
        assert replace(again.request, request_id=wanted.request_id) == wanted
        b.engine.is_paused = False
        assert tokens(await answer) == expected_tokens([5], 0, 7)

    with_cluster(test)


def test_without_another_group_the_stream_ends_with_the_reason() -> None:
    async def test(groups: Cluster) -> None:
        a = await groups.add_group("a")
        router = await groups.add_router()
        answer = asyncio.create_task(collect(router, request("r", [5], 10**6, 2)))
        await until(lambda: a.engine.num_steps > 10)
        a.engine.step(failure="rank 0 was killed")
        chunks = await answer
        assert ends(chunks) == [
            (0, FinishReason.ERROR, "group_failed"),
            (1, FinishReason.ERROR, "group_failed"),
        ]
        expected = "worker group a failed: rank 0 was killed; no other group could go on within 1 s"
        assert chunks[-1].error == expected
        assert router.move_counts() == Counter(no_group=1)

    with_cluster(test)


def test_a_reader_that_leaves_while_it_is_moved_is_forgotten() -> None:
    async def test(groups: Cluster) -> None:
        a = await groups.add_group("a")
        router = await groups.add_router()
        answer = asyncio.create_task(collect(router, request("r", [5], 10**6)))
        await until(lambda: a.engine.num_steps > 10)
        a.engine.step(failure="rank 0 was killed")
        await asyncio.sleep(0.1)
        answer.cancel()
        b = await groups.add_group("b")
        await until(lambda: sum(state.is_ready for state in router.groups()) == 1)
        await asyncio.sleep(0.1)
        assert [name for name in b.engine.submitted if not name.startswith("canary")] == []

    with_cluster(test)


def test_a_request_that_kills_its_groups_is_quarantined_and_the_others_live() -> None:
    """Group a dies of it, then b, which by then runs what a ran: that goes on once more, in c."""

    async def test(groups: Cluster) -> None:
        a = await groups.add_group("a")
        router = await groups.add_router()
        mates = [asyncio.create_task(collect(router, request(f"m{i}", [20 + i], 400))) for i in range(20)]
        await until(lambda: len(a.engine.running) == 20 and a.engine.num_steps > 30)
        a.engine.is_paused = True  # before it answers the last one
        poison = asyncio.create_task(collect(router, request("p", [POISON], 5)))
        await until(lambda: has_poison(a))
        b = await groups.add_group("b", steps=False)
        proof = asyncio.create_task(prove(b))
        await until(lambda: both_ready(router))
        proof.cancel()
        a.engine.running.clear()
        a.engine.step(failure="killed by a prompt")
        await until(lambda: len(b.engine.running) == 21 and has_poison(b))
        suspect = next(key for key in b.engine.running if key.startswith("p"))
        del b.engine.running[suspect]  # it has got nothing when the group dies of it
        for _ in range(3):
            b.engine.step()
        b.engine.running.clear()
        b.engine.step(failure="killed by the prompt again")
        (last,) = await poison
        assert last.error_code == "request_quarantined"
        await groups.add_group("c")
        for i, mate in enumerate(mates):
            assert tokens(await mate) == expected_tokens([20 + i], 0, 400)

    with_cluster(test, timeout_s=20.0)


def has_poison(group: FakeGroup) -> bool:
    return any(POISON in running.request.prompt_token_ids for running in group.engine.running.values())


async def prove(group: FakeGroup) -> None:
    """Steps until the canary has been answered."""
    while True:
        await asyncio.sleep(0.005)
        group.engine.step()


def test_two_that_had_got_nothing_are_tried_one_after_the_other() -> None:
    async def test(groups: Cluster) -> None:
        a = await groups.add_group("a")
        router = await groups.add_router()
        a.engine.is_paused = True
        answers = [asyncio.create_task(collect(router, request(f"r{i}", [i], 5))) for i in range(2)]
        await until(lambda: len(a.engine.running) == 2)
        b = await groups.add_group("b")
        await until(lambda: both_ready(router))
        b.engine.is_paused = True
        a.engine.running.clear()
        a.engine.step(failure="killed by one of them")
        await until(lambda: len(b.engine.running) == 1)
        await asyncio.sleep(0.1)
        assert len(b.engine.running) == 1
        b.engine.is_paused = False
        for i, answer in enumerate(answers):
            assert tokens(await answer) == expected_tokens([i], 0, 5)

    with_cluster(test)
