from __future__ import annotations

import asyncio

import pytest

from tests.unit.dataplane.fakes import (
    SECRET,
    FakeGroup,
    expected_tokens,
    info,
    request,
    run,
    serving,
    until,
)
from workers.channel import Channel, ClientIdentity, HandshakeFailed, connect
from workers.hashing import BlockHash
from workers.server import ServerLimits
from workers.submit import SubmitRefused
from workers.types import RequestId, TokenChunk
from workers.wire import (
    Abort,
    Challenge,
    Chunks,
    Events,
    FrameReader,
    Goodbye,
    Hello,
    Message,
    Ping,
    Pong,
    Resync,
    Snapshot,
    Stats,
    Submit,
    Welcome,
    encode,
    hello_mac,
)


class Reader:
    """A router of a few lines: keeps every message, answers heartbeats."""

    def __init__(self, client_id: str = "router", *, secret: bytes = SECRET, answers: bool = True) -> None:
        self.identity = ClientIdentity(client_id=client_id, secret=secret, subscribes=True)
        self.answers = answers
        self.messages: list[Message] = []
        self.reason: str | None = None
        self.channel: Channel | None = None

    async def connect(self, group: FakeGroup) -> Reader:
        address = group.address
        self.channel, _ = await connect(
            address.host, address.port, self.identity, on_message=self._message, on_closed=self._closed
        )
        return self

    def send(self, message: Message) -> None:
        assert self.channel is not None
        self.channel.send(message)

    @property
    def frames(self) -> list[Chunks]:
        return [message for message in self.messages if isinstance(message, Chunks)]

    @property
    def chunks(self) -> list[TokenChunk]:
        return [chunk for frame in self.frames for chunk in frame.chunks]

    def tokens(self, name: str, choice: int = 0) -> list[int]:
        return [
            token
            for chunk in self.chunks
            if chunk.request_id == name and chunk.choice == choice
            for token in chunk.token_ids
        ]

    @property
    def log(self) -> list[Snapshot | Events]:
        return [message for message in self.messages if isinstance(message, Snapshot | Events)]

    def _message(self, channel: Channel, message: Message) -> None:
        self.messages.append(message)
        if self.answers and isinstance(message, Ping):
            channel.send(Pong())

    def _closed(self, _channel: Channel, reason: str) -> None:
        self.reason = reason


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


def test_a_lost_client_takes_its_requests_along() -> None:
    async def test() -> None:
        async with serving() as group:
            reader, other = await Reader().connect(group), await Reader("other").connect(group)
            await group.front.submit("router", request("a", max_tokens=100))
            await group.front.submit("other", request("b", max_tokens=2))
            assert reader.channel is not None
            reader.channel.drop("the router was killed")
            await until(lambda: group.engine.aborted == ["a"])
            group.engine.step()
            group.engine.step()
            await until(lambda: len(other.chunks) == 2)
            with pytest.raises(SubmitRefused, match="'router' is not there") as refused:
                await group.front.submit("router", request("c"))
            assert refused.value.code == "client_not_connected"
            assert "c" not in group.engine.submitted

    run(test())


def test_a_client_that_comes_again_ends_its_older_connection() -> None:
    async def test() -> None:
        async with serving() as group:
            old = await Reader().connect(group)
            await group.front.submit("router", request("a", max_tokens=100))
            new = await Reader().connect(group)
            await until(lambda: old.reason is not None)
            assert group.engine.aborted == ["a"]
            await group.front.submit("router", request("b", max_tokens=1))
            group.engine.step()
            await until(lambda: len(new.chunks) == 1)
            assert old.chunks == []

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


async def greet_and_read_no_more(client_id: str, group: FakeGroup) -> asyncio.StreamWriter:
    """A client whose kernel and stream buffers fill up."""
    reader, writer = await asyncio.open_connection(group.address.host, group.address.port, limit=1000)
    frames = FrameReader(10_000)
    challenge = None
    while challenge is None:
        challenge = next(frames.feed(await reader.read(10_000)), None)
    assert isinstance(challenge, Challenge)
    mac = hello_mac(SECRET, challenge.nonce, b"nonce", client_id)
    writer.write(encode(Hello(client_id=client_id, nonce=b"nonce", mac=mac, subscribes=False)))
    await until(lambda: client_id in group.server.client_ids)
    return writer


def test_a_client_that_does_not_read_is_dropped_and_harms_nobody() -> None:
    async def test() -> None:
        async with serving(ServerLimits(max_outgoing_bytes=100_000, heartbeat_s=60.0)) as group:
            good = await Reader("good").connect(group)
            writer = await greet_and_read_no_more("slow", group)
            for i in range(100):
                await group.front.submit("slow", request(f"s{i}", max_tokens=100_000, num_choices=8))
            await group.front.submit("good", request("g", max_tokens=400))
            steps = 0
            while len(group.server.client_ids) == 3:  # the front, slow, good
                group.engine.step()
                steps += 1
                await until(lambda: len(good.chunks) == steps)  # noqa: B023
                assert steps < 400
            assert sorted(group.engine.aborted) == sorted(f"s{i}" for i in range(100))
            assert group.server.client_ids == ["front-g1", "good"]
            group.engine.step()
            await until(lambda: len(good.chunks) == steps + 1)
            writer.close()

    run(test())


def test_silent_clients_are_dropped_and_answering_ones_stay() -> None:
    async def test() -> None:
        limits = ServerLimits(heartbeat_s=0.05, dead_after_s=0.2, greeting_timeout_s=0.1)
        async with serving(limits) as group:
            silent, alive = await Reader("silent", answers=False).connect(group), Reader("alive")
            await alive.connect(group)
            mute, writer = await asyncio.open_connection(group.address.host, group.address.port)
            await until(lambda: silent.reason is not None)
            assert await mute.read() != b""  # the challenge, then the end
            writer.close()
            await asyncio.sleep(0.2)
            assert alive.reason is None
            assert group.server.client_ids == ["front-g1", "alive"]

    run(test())


def test_wrong_secrets_are_refused_on_both_sides() -> None:
    async def test() -> None:
        async with serving() as group:
            with pytest.raises(HandshakeFailed, match="connection"):
                await Reader(secret=b"another").connect(group)
            assert group.server.client_ids == ["front-g1"]

        class Impostor(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                self.transport = transport
                assert isinstance(transport, asyncio.Transport)
                transport.write(encode(Challenge(nonce=b"n" * 32)))
                transport.write(encode(Welcome(info=info(), mac=b"m" * 32)))

        server = await asyncio.get_running_loop().create_server(Impostor, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        identity = ClientIdentity(client_id="router", secret=SECRET, subscribes=True)
        messages: list[Message] = []
        with pytest.raises(HandshakeFailed, match="does not know the application's secret"):
            await connect(
                host,
                port,
                identity,
                on_message=lambda _, message: messages.append(message),
                on_closed=lambda _, reason: None,
            )
        assert messages == []
        server.close()

    run(test())


BAD_GREETINGS: list[bytes] = [
    b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 100,  # TLS
    (1 << 20).to_bytes(4, "little") + b"\x01",  # larger than a greeting may be
    encode(Submit(client_id="router", request=request("a"))),  # before HELLO
    encode(Hello(client_id="router", nonce=b"", mac=b"", subscribes=False)),
    b"\x02\x00\x00\x00\x01\xc1",
]


@pytest.mark.parametrize("data", BAD_GREETINGS)
def test_garbage_before_the_greeting_is_dropped(data: bytes) -> None:
    async def test() -> None:
        async with serving() as group:
            stream, writer = await asyncio.open_connection(group.address.host, group.address.port)
            writer.write(data)
            async with asyncio.timeout(2.0):
                try:
                    while await stream.read(1000):
                        pass
                except ConnectionResetError:
                    pass
            writer.close()
            assert group.engine.submitted == []
            assert group.front.is_open

    run(test())


BAD_FRAMES: list[bytes] = [
    b"\xff" * 64,
    b"\x02\x00\x00\x00\x07\xc1",
    (1 << 30).to_bytes(4, "little"),
    encode(Goodbye(reason="a client does not say this")),
]


@pytest.mark.parametrize("data", BAD_FRAMES)
def test_garbage_from_a_greeted_client_ends_that_client_only(data: bytes) -> None:
    async def test() -> None:
        async with serving() as group:
            bad, good = await Reader("bad").connect(group), await Reader("good").connect(group)
            await group.front.submit("bad", request("a", max_tokens=100))
            await group.front.submit("good", request("b", max_tokens=1))
            assert bad.channel is not None
            bad.channel.write(data)
            await until(lambda: group.engine.aborted == ["a"])
            group.engine.step()
            await until(lambda: len(good.chunks) == 1)

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
