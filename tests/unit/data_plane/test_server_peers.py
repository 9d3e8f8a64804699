"""Who may talk to a group's server, and how it gets rid of those who do it badly."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from tests.unit.data_plane.fakes import (
    SECRET,
    FakeGroup,
    info,
    request,
    run,
    serving,
    start_group,
    until,
)
from tests.unit.data_plane.pools import PooledEngine
from tests.unit.data_plane.reader import Reader
from workers.data_plane.channel import ClientIdentity, HandshakeFailed, connect
from workers.data_plane.server_terms import ServerLimits
from workers.data_plane.submit import SubmitRefused
from workers.data_plane.wire import (
    Challenge,
    Goodbye,
    Hello,
    Message,
    Redirect,
    Resync,
    Submit,
    Welcome,
    encode,
    frame_reader,
    hello_mac,
)
from workers.types import GroupId, KVSource, RequestId


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


async def greet_and_read_no_more(client_id: str, group: FakeGroup) -> asyncio.StreamWriter:
    """A client whose kernel and stream buffers fill up."""
    reader, writer = await asyncio.open_connection(group.address.host, group.address.port, limit=1000)
    frames = frame_reader(10_000)
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


def test_a_redirect_reaches_the_engine_for_one_s_own_running_requests_only() -> None:
    async def test() -> None:
        engine = PooledEngine({}, "g1")
        group = await start_group(engine=engine, steps=False)
        try:
            reader, other = await Reader().connect(group), await Reader("other").connect(group)
            source = KVSource(group_id=GroupId("p"), host="127.0.0.1", port=1234, transfer_id="0f" * 16)
            await group.front.submit("router", replace(request("a"), kv_source=source))
            other.send(Redirect(request_id=RequestId("a"), source=None))
            other.send(Resync())
            await until(lambda: len(other.log) == 2)
            reader.send(Redirect(request_id=RequestId("unknown"), source=None))
            reader.send(Redirect(request_id=RequestId("a"), source=replace(source, group_id=GroupId("q"))))
            reader.send(Redirect(request_id=RequestId("a"), source=None))
            await until(lambda: len(engine.redirects) == 2)
            assert engine.redirects == [("a", "q"), ("a", None)]
            engine.step()
            await until(lambda: len(reader.chunks) == 1)
        finally:
            await group.stop()

    run(test())
