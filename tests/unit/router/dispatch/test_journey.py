"""Requests whose group ends go on in another one, with the tokens they would have had."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

from router.dispatch.attempts import Attempt
from router.dispatch.dispatcher import SocketDispatcher
from router.dispatch.journey import Journey
from router.dispatch.streams import RequestStream
from tests.unit.data_plane.fakes import (
    FAST,
    Cluster,
    FakeGroup,
    collect,
    expected_tokens,
    request,
    run,
    tokens,
    until,
    with_cluster,
)
from workers.types import (
    BeamParams,
    FinishReason,
    GenerateRequest,
    RequestId,
    SamplingParams,
    StageTimes,
    TokenChunk,
    error_chunk,
)

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
        assert router.route_counts().moves == Counter(moved=5)
        decision = router.explain(RequestId("r3"))
        assert decision is not None and (decision.taken_by, decision.num_moves) == ("b", 1)
        assert decision.num_attempts == 2
        assert router.route_counts().decisions["retry"] == 0  # the best group took each of them

    with_cluster(test)


def test_what_a_moved_request_has_got_is_computed_again_and_counts_as_its_prompt_does() -> None:
    async def test(groups: Cluster) -> None:
        a = await groups.add_group("a")
        router = await groups.add_router()
        answer = asyncio.create_task(collect(router, request("r", [5], 500)))
        await until(lambda: a.engine.num_steps > 300)
        a.engine.is_paused = True
        b = await add_idle_group(groups, router, "b")
        await kill(a)
        await until(lambda: len(b.engine.running) == 1)
        (again,) = b.engine.running.values()
        num_known = 1 + len(again.request.begun[0].token_ids)
        assert num_known > 200
        decision = router.explain(RequestId("r"))
        assert decision is not None and decision.num_prompt_tokens == num_known
        b.engine.start()
        assert tokens(await answer) == expected_tokens([5], 0, 500)

    with_cluster(test)


def test_groups_that_are_told_to_end_cost_their_requests_nothing_however_many_they_are() -> None:
    async def test(groups: Cluster) -> None:
        old = await groups.add_group("a")
        router = await groups.add_router()
        answer = asyncio.create_task(collect(router, request("r", [5], 1500)))
        for name in ("b", "c", "d", "e", "f"):
            await until(lambda: bool(old.engine.running))  # noqa: B023
            new = await groups.add_group(name)
            await until(lambda: both_ready(router))
            groups.listed = [new.address]
            await old.server.stop("the group was stopped", is_planned=True)
            old = new
        chunks = await answer
        assert tokens(chunks) == expected_tokens([5], 0, 1500)
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
        assert replace(again.request, request_id=wanted.request_id, priority=0) == wanted
        assert again.request.priority < 0  # nobody else is tried before it has a token
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
        assert router.route_counts().moves == Counter(no_group=1)

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
        b = await add_idle_group(groups, router, "b")
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


def test_one_that_kills_its_groups_while_decoding_does_not_take_the_others_with_it() -> None:
    """Each group dies of it at the same token: the first under all of them, the second when it has it again,
    the third in its trial."""

    async def test(groups: Cluster) -> None:
        a = await groups.add_group("a")
        router = await groups.add_router()
        mates = [asyncio.create_task(collect(router, request(f"m{i}", [20 + i], 900))) for i in range(5)]
        poison = asyncio.create_task(collect(router, request("p", [POISON], 900)))
        await until(lambda: len(a.engine.running) == 6 and a.engine.num_steps > 30)
        a.engine.is_paused = True
        b = await add_idle_group(groups, router, "b")
        await kill(a)
        await until(lambda: len(b.engine.running) == 6)
        for last in ("p", "m4"):  # come to their turn when the others have had some tokens
            del b.engine.running[next(key for key in b.engine.running if key.startswith(last))]
        for _ in range(3):
            b.engine.step()
        c = await add_idle_group(groups, router, "c")
        await kill(b)
        while not has_poison(c):
            c.engine.step()
            await asyncio.sleep(0.002)
        await groups.add_group("d")
        await until(lambda: both_ready(router))
        await kill(c)
        assert (await poison)[-1].error_code == "request_quarantined"
        for i, mate in enumerate(mates):
            assert tokens(await mate) == expected_tokens([20 + i], 0, 900)

    with_cluster(test, timeout_s=20.0)


def test_many_suspects_wait_for_their_turn_as_long_as_it_takes() -> None:
    """Each is tried for longer than a group would be waited for."""

    async def test(groups: Cluster) -> None:
        a = await groups.add_group("a")
        router = await groups.add_router(limits=replace(FAST, move_wait_s=0.3))
        a.engine.is_paused = True
        answers = [asyncio.create_task(collect(router, request(f"r{i}", [i], 5))) for i in range(4)]
        await until(lambda: len(a.engine.running) == 4)
        b = await add_idle_group(groups, router, "b")
        await kill(a)
        for _ in range(4):
            await until(lambda: len(b.engine.running) == 1)
            await asyncio.sleep(0.2)
            for _ in range(5):
                b.engine.step()
        for i, answer in enumerate(answers):
            assert tokens(await answer) == expected_tokens([i], 0, 5)

    with_cluster(test)


def test_a_suspect_whose_reader_leaves_is_no_excuse_for_others() -> None:
    async def test(groups: Cluster) -> None:
        a = await groups.add_group("a")
        router = await groups.add_router()
        a.engine.is_paused = True
        leaving = asyncio.create_task(collect(router, request("r", [1], 5)))
        await until(lambda: len(a.engine.running) == 1)
        b = await groups.add_group("b")
        await until(lambda: both_ready(router))
        b.engine.is_paused = True
        await kill(a)
        await until(lambda: len(b.engine.running) == 1)
        await asyncio.sleep(0.02)
        (link,) = (link for link in router._table.ready_links())
        assert link.suspect == "r~2"
        leaving.cancel()
        await until(lambda: link.suspect is None)

    with_cluster(test)


async def add_idle_group(groups: Cluster, router: SocketDispatcher, name: str) -> FakeGroup:
    """A second group that is ready, and steps only when told to."""
    group = await groups.add_group(name, steps=False)
    proof = asyncio.create_task(prove(group))
    await until(lambda: both_ready(router))
    proof.cancel()
    return group


async def kill(group: FakeGroup) -> None:
    """It computes nothing more, and says so."""
    group.engine.is_paused = True
    group.engine.running.clear()
    group.engine.step(failure="killed")


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


def test_a_beam_search_that_has_begun_is_no_suspect_of_a_crash() -> None:
    """Its tokens come at its end, so until then all that it has got is the word that it has begun."""
    wanted = replace(request("r", [5], 8, 2), beam=BeamParams(width=3))
    wanted = replace(wanted, sampling=replace(wanted.sampling, num_prompt_logprobs=0))
    begun = TokenChunk(
        request_id=wanted.request_id,
        choice=0,
        num_cached_tokens=16,
        times=StageTimes(queue_s=0.0, transfer_s=0.0, compute_s=0.1),
        prompt_logprobs=(None,),
    )

    async def test() -> None:
        journey, attempt = Journey(wanted), attempt_of(wanted)
        assert journey.take(begun) is begun
        for crashes in (1, 2, 3):
            lose(journey)
            journey.end_of_group(attempt)
            assert (journey.num_crashes, journey.num_suspicions, journey.is_suspect) == (crashes, 0, False)
            again = journey.move()
            # The reader knows of its prompt already.
            assert again == replace(wanted, sampling=replace(wanted.sampling, num_prompt_logprobs=None))
            assert journey.take(begun) == replace(begun, num_cached_tokens=0, prompt_logprobs=None)
        lose(journey)
        journey.end_of_group(attempt)
        journey.move()
        lose(journey)  # before it had begun
        journey.end_of_group(attempt)
        assert (journey.num_suspicions, journey.is_suspect) == (1, True)

    run(test())


def attempt_of(wanted: GenerateRequest) -> Attempt:
    loop = asyncio.get_running_loop()
    return Attempt(
        wire_id=wanted.request_id,
        stream=RequestStream(wanted),
        links={},
        target=None,  # type: ignore[arg-type]  # not looked at
        taken=loop.create_future(),
        begun=loop.create_future(),
    )


def lose(journey: Journey) -> None:
    """Its group crashes."""
    for choice in (0, 1):
        assert journey.take(error_chunk(RequestId("r"), choice, "group_failed", "gone")) is None


def test_a_beam_search_is_made_anew_and_what_had_come_of_it_stays() -> None:
    wanted = replace(request("r", [5], 8, 2), beam=BeamParams(width=3))
    journey = Journey(wanted)
    found = [
        TokenChunk(
            request_id=wanted.request_id, choice=choice, token_ids=(7,), finish_reason=FinishReason.LENGTH
        )
        for choice in (0, 1)
    ]
    assert journey.take(found[0]) is found[0]
    assert journey.take(error_chunk(wanted.request_id, 1, "group_failed", "gone")) is None
    assert journey.move() == wanted
    assert journey.take(found[0]) is None
    last = journey.take(found[1])
    assert last is not None and last.token_ids == (7,)
    assert journey.is_over
