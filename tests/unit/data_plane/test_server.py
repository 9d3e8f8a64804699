"""What a group's server sends: tokens, the log of blocks, stats, the last words."""

from __future__ import annotations

import asyncio

import pytest

from tests.unit.data_plane.fakes import (
    FakeGroup,
    expected_tokens,
    request,
    run,
    serving,
    until,
)
from tests.unit.data_plane.reader import Reader
from workers.data_plane.channel import HandshakeFailed
from workers.data_plane.server_terms import ServerLimits
from workers.data_plane.submit import SubmitRefused
from workers.data_plane.wire import (
    Abort,
    Chunks,
    Events,
    Goodbye,
    Resync,
    Snapshot,
    Stats,
)
from workers.hashing import BlockHash
from workers.types import RequestId


def test_sixteen_streams_get_one_frame_a_step() -> None:
    async def test() -> None:
        async with serving() as group:
            reader = await Reader().connect(group)
            names = [f"r{i}" for i in range(16)]
            for i, name in enumerate(names):
                await group.front.submit("router", request(name, [i, 5], max_tokens=4))
            for step in range(4):
                group.engine.step()
                await until(lambda: len(reader.frames) == step + 1)  # noqa: B023
            assert [len(frame.chunks) for frame in reader.frames] == [16] * 4
            for i, name in enumerate(names):
                assert reader.tokens(name) == expected_tokens([i, 5], 0, 4)
            assert group.server.num_requests == 0
            assert group.engine.aborted == []

    run(test())


def test_tokens_go_to_the_client_of_the_request_only() -> None:
    async def test() -> None:
        async with serving() as group:
            first, second = await Reader("first").connect(group), await Reader("second").connect(group)
            await group.front.submit("first", request("a", num_choices=2))
            await group.front.submit("second", request("b", [9]))
            for _ in range(3):
                group.engine.step()
            await until(lambda: len(first.chunks) == 6 and len(second.chunks) == 3)
            assert first.tokens("a", 1) == expected_tokens([1, 2, 3], 1, 3)
            assert second.tokens("b") == expected_tokens([9], 0, 3)
            assert {chunk.request_id for chunk in first.chunks} == {"a"}

    run(test())


def test_steps_that_wait_for_the_loop_are_written_together() -> None:
    async def test() -> None:
        async with serving() as group:
            reader = await Reader().connect(group)
            await group.front.submit("router", request("a", max_tokens=3))
            for _ in range(3):  # no turn of the event loop in between
                group.engine.step()
            await until(lambda: len(reader.chunks) == 3)
            assert len(reader.frames) == 1

    run(test())


def test_snapshot_then_strictly_consecutive_events() -> None:
    async def test() -> None:
        async with serving(ServerLimits(snapshot_part_blocks=2)) as group:
            old = [BlockHash(bytes([i]) * 16) for i in range(5)]
            group.engine.store(old)
            group.engine.step()
            await asyncio.sleep(0.02)
            reader = await Reader().connect(group)
            new = BlockHash(b"n" * 16)
            group.engine.store([new])
            group.engine.evict(old[:1])
            group.engine.step()
            await until(lambda: len(reader.log) == 4)
            parts = reader.log[:3]
            assert [type(part) for part in parts] == [Snapshot] * 3
            assert [(p.number, p.is_last) for p in parts if isinstance(p, Snapshot)] == [
                (1, False), (1, False), (1, True)]  # fmt: skip
            seen = [h for part in parts if isinstance(part, Snapshot) for h in part.block_hashes]
            assert sorted(seen) == sorted(old)
            assert isinstance(reader.log[3], Events)
            assert [event.number for event in reader.log[3].events] == [2, 3]

    run(test())


def test_resync_and_a_gap_in_the_engines_log_give_a_snapshot() -> None:
    async def test() -> None:
        async with serving() as group:
            reader = await Reader().connect(group)
            group.engine.store([BlockHash(b"a" * 16)])
            group.engine.step()
            await until(lambda: len(reader.log) == 2)
            reader.send(Resync())
            await until(lambda: len(reader.log) == 3)
            assert reader.log[2] == Snapshot(number=1, block_hashes=(BlockHash(b"a" * 16),), is_last=True)
            group.engine.lose_event()
            group.engine.store([BlockHash(b"b" * 16)])
            group.engine.step()
            await until(lambda: len(reader.log) == 4)
            # What was known before the gap may be gone by now, so only the new block is sure.
            assert reader.log[3] == Snapshot(number=3, block_hashes=(BlockHash(b"b" * 16),), is_last=True)

    run(test())


def test_stats_come_once_a_period_and_the_last_ones_always() -> None:
    async def test() -> None:
        async with serving(ServerLimits(stats_period_s=0.1, heartbeat_s=60.0)) as group:
            reader = await Reader().connect(group)
            for _ in range(20):
                group.engine.step()
                await asyncio.sleep(0.005)

            def numbers() -> list[int]:
                return [m.stats.num_steps for m in reader.messages if isinstance(m, Stats)]

            await until(lambda: numbers()[-1] == 20)
            assert len(numbers()) <= 5  # the greeting's, the first, and one per 100 ms

    run(test())


def test_abort_frees_and_later_tokens_are_not_sent() -> None:
    async def test() -> None:
        async with serving() as group:
            reader, other = await Reader().connect(group), await Reader("other").connect(group)
            await group.front.submit("router", request("a", max_tokens=100))
            group.engine.step()
            await until(lambda: len(reader.chunks) == 1)
            other.send(Abort(request_id=RequestId("a")))  # not its request
            other.send(Resync())
            await until(lambda: len(other.log) == 2)
            assert group.engine.aborted == []
            reader.send(Abort(request_id=RequestId("a")))
            await until(lambda: group.engine.aborted == ["a"])
            assert group.server.num_requests == 0
            group.engine.step()
            await asyncio.sleep(0.02)
            assert len(reader.chunks) == 1

    run(test())


def test_submissions_that_are_refused() -> None:
    async def code(group: FakeGroup, client_id: str, name: str, num_choices: int = 1) -> str:
        with pytest.raises(SubmitRefused) as refused:
            await group.front.submit(client_id, request(name, num_choices=num_choices))
        return refused.value.code

    async def test() -> None:
        async with serving() as group:
            reader = await Reader().connect(group)
            await group.front.submit("router", request("a", max_tokens=100))
            assert await code(group, "router", "a") == "duplicate_request"
            assert await code(group, "router", "many", 10**9) == "invalid_value"
            reader.send(Abort(request_id=RequestId("late")))  # before its SUBMIT, on another connection
            reader.send(Resync())
            await until(lambda: len(reader.log) == 2)
            assert await code(group, "router", "late") == "aborted"
            await group.front.submit("router", request("late"))  # the abort is used up
            assert group.engine.submitted == ["a", "late"]
            group.engine.step(failure="rank 1 died")
            await until(lambda: not group.front.is_open)
            assert await code(group, "router", "b") == "not_connected"

    run(test())


def test_a_dead_engine_says_goodbye_after_the_last_chunks() -> None:
    async def test() -> None:
        async with serving() as group:
            reader = await Reader().connect(group)
            await group.front.submit("router", request("a", max_tokens=1))
            group.engine.step(failure="rank 1 died")
            await until(lambda: reader.reason is not None)
            assert isinstance(reader.messages[-2], Chunks)
            assert reader.messages[-1] == Goodbye(reason="rank 1 died")
            with pytest.raises(HandshakeFailed, match="rank 1 died"):
                await Reader().connect(group)

    run(test())


def test_an_output_on_its_way_does_not_make_a_planned_end_a_failure() -> None:
    async def test() -> None:
        async with serving() as group:
            reader = await Reader().connect(group)
            await group.front.submit("router", request("a", max_tokens=100))
            group.engine.step()
            await group.server.stop("the replica is drained", is_planned=True)
            await until(lambda: reader.reason is not None)
            assert reader.messages[-1] == Goodbye(reason="the replica is drained", is_planned=True)

    run(test())


def test_stop_says_goodbye_and_takes_no_more_output() -> None:
    async def test() -> None:
        async with serving() as group:
            reader = await Reader().connect(group)
            await group.front.submit("router", request("a", max_tokens=100))
            await group.server.stop("the replica is drained")
            await until(lambda: reader.reason is not None)
            assert reader.messages[-1] == Goodbye(reason="the replica is drained")
            assert group.engine.aborted == ["a"]
            group.engine.step()
            await asyncio.sleep(0.01)
            assert reader.chunks == []

    run(test())
