"""The data plane over the real engine and its loop, with a toy model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from router.dispatch.dispatcher import SocketDispatcher
from tests.unit.data_plane.fakes import FAST, FAST_SERVER, SECRET, collect, info, run, tokens, until
from tests.unit.engine.toy import VOCAB, ToyExecutor, reference
from workers.config import CacheConfig, ScheduleConfig
from workers.data_plane.channel import ClientIdentity
from workers.data_plane.server import StreamServer
from workers.data_plane.submit import SubmitClient
from workers.engine.engine import Engine
from workers.engine.loop import EngineLoop
from workers.engine.request import EngineLimits
from workers.engine.step import GroupFailed, StepPlan
from workers.types import (
    FinishReason,
    GenerateRequest,
    GroupAddress,
    GroupId,
    RequestId,
    Role,
    SamplingParams,
)

BLOCK_SIZE = 4
NUM_BLOCKS = 60
A = GroupId("g1")


@dataclass
class Served:
    engine: Engine
    executor: ToyExecutor
    loop: EngineLoop
    server: StreamServer
    router: SocketDispatcher


@asynccontextmanager
async def served() -> AsyncIterator[Served]:
    """One group with a small pool, and one router."""
    executor = ToyExecutor(NUM_BLOCKS, BLOCK_SIZE)
    engine = Engine(
        limits=EngineLimits(vocab_size=VOCAB, max_model_len=128, eos_token_ids=(0,)),
        cache=CacheConfig(block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS),
        schedule=ScheduleConfig(max_step_tokens=32),
        executor=executor,
    )
    described = replace(info(num_blocks=NUM_BLOCKS), vocab_size=VOCAB, block_size=BLOCK_SIZE)
    server = StreamServer(info=described, secret=SECRET, limits=FAST_SERVER)
    loop = EngineLoop(engine, server.on_output)
    host, port = await server.start(loop, "127.0.0.1")
    loop.start()
    front = SubmitClient(ClientIdentity(client_id="front", secret=SECRET, subscribes=False))
    await front.connect(host, port)
    address = GroupAddress(group_id=A, replica_id="g1", host=host, port=port, role=Role.UNIFIED, epoch=1)

    async def source() -> Sequence[GroupAddress]:
        return [address]

    async def send(order: Sequence[GroupId], client_id: str, wanted: GenerateRequest) -> GroupId:
        await front.submit(client_id, wanted)
        return order[0]

    router = SocketDispatcher(secret=SECRET, source=source, send=send, limits=FAST)
    await router.start()
    try:
        await until(lambda: any(state.is_ready for state in router.groups()))
        yield Served(engine, executor, loop, server, router)
    finally:
        await router.stop()
        front.close()
        await asyncio.to_thread(loop.stop, 5.0)
        await server.stop("the test ends")


def ask(name: str, prompt: Sequence[int], **changes: object) -> GenerateRequest:
    sampling = replace(SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True), **changes)  # type: ignore[arg-type]  # fields by name
    return GenerateRequest(request_id=RequestId(name), prompt_token_ids=tuple(prompt), sampling=sampling)


def test_many_requests_under_eviction_and_preemption_keep_tokens_and_index_exact() -> None:
    async def test() -> None:
        async with served() as group:
            wanted = [
                replace(
                    ask(f"r{i}", [1 + i % 5] * 12 + [i % VOCAB] * (1 + i % 9), temperature=1.0, seed=i),
                    num_choices=1 + i % 3,
                )
                for i in range(60)
            ]
            answers = await asyncio.gather(*(collect(group.router, request) for request in wanted))
            for request, chunks in zip(wanted, answers, strict=True):
                for choice in range(request.num_choices):
                    assert tokens(chunks, choice) == reference(request, choice)
            await until(lambda: not group.engine.has_work())
            number = group.router.index.number
            await until(lambda: number(A) > 0 and group.router.index.is_usable(A))
            cached = await stable_blocks(group.router)
            assert len(cached) == group.engine.stats().cached_blocks
            assert group.server.num_requests == 0
            group.engine.check_integrity()

    run(test(), 20.0)


async def stable_blocks(router: SocketDispatcher) -> frozenset[bytes]:
    """The index once no more events come."""
    before = -1
    while router.index.number(A) != before:
        before = router.index.number(A)
        await asyncio.sleep(0.05)
    return frozenset(router.index.blocks(A))


def test_cached_tokens_follow_what_the_router_foresaw() -> None:
    async def test() -> None:
        async with served() as group:
            prompt = list(range(1, 34))
            first = await collect(group.router, ask("first", prompt))
            again = await collect(group.router, ask("again", prompt))
            assert first[0].num_cached_tokens == 0
            assert again[0].num_cached_tokens == 32
            decision = group.router.explain(RequestId("again"))
            assert decision is not None and decision.matches == {A: 8}
            assert tokens(again) == tokens(first) == reference(ask("first", prompt))

    run(test())


def test_refusals_of_the_engine_end_every_choice() -> None:
    async def test() -> None:
        async with served() as group:
            too_long = replace(ask("long", [1] * 200), num_choices=2)
            chunks = await collect(group.router, too_long)
            assert [(c.choice, c.finish_reason, c.error_code) for c in chunks] == [
                (0, FinishReason.ERROR, "context_length_exceeded"),
                (1, FinishReason.ERROR, "context_length_exceeded"),
            ]

    run(test())


def test_leaving_frees_every_block_in_the_engine() -> None:
    async def test() -> None:
        async with served() as group:
            streams = [group.router.generate(ask(f"r{i}", [i + 1] * 20, max_tokens=100)) for i in range(6)]
            for stream in streams[:3]:  # three have tokens, three only wait
                await anext(stream)
            waiting = [asyncio.create_task(anext(stream)) for stream in streams[3:]]
            await asyncio.sleep(0.01)
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            for stream in streams:
                await stream.aclose()
            await until(lambda: not group.engine.has_work() and group.server.num_requests == 0)
            stats = group.engine.stats()
            assert stats.active_blocks == 0
            assert stats.free_blocks + stats.cached_blocks == NUM_BLOCKS
            group.engine.check_integrity()
            assert tokens(await collect(group.router, ask("s", [5, 6]))) == reference(ask("s", [5, 6]))

    run(test())


def test_a_rank_that_dies_ends_all_streams_with_its_reason() -> None:
    async def test() -> None:
        async with served() as group:
            num_steps = 0

            def die(_plan: StepPlan) -> None:
                nonlocal num_steps
                num_steps += 1
                if num_steps > 5:
                    raise GroupFailed("rank 1 ended with exit code -9")

            group.executor.before_step = die
            wanted = replace(ask("r", [1, 2, 3], max_tokens=100), num_choices=2)
            chunks = await collect(group.router, wanted)
            for choice in (0, 1):
                got = tokens(chunks, choice)
                assert 0 < len(got) < 100 and got == reference(wanted, choice)[: len(got)]
            ends = [chunk for chunk in chunks if chunk.finish_reason is not None]
            assert sorted((c.choice, c.finish_reason, c.error_code) for c in ends) == [
                (0, FinishReason.ERROR, "engine_dead"),
                (1, FinishReason.ERROR, "engine_dead"),
            ]
            assert all(end.error is not None and "exit code -9" in end.error for end in ends)
            await until(lambda: not any(state.is_ready for state in group.router.groups()))

    run(test())
