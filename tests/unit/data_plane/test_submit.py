"""The front's side of its connection to rank 0: greetings that get no answer, and heartbeats."""

from __future__ import annotations

import asyncio
import re

import pytest

from tests.unit.data_plane.fakes import SECRET, FakeGroup, request, run, serving, until
from workers.data_plane.channel import ClientIdentity, HandshakeFailed
from workers.data_plane.server_terms import ServerLimits
from workers.data_plane.submit import SubmitClient, SubmitRefused


def test_a_front_that_gets_no_answer_gives_up_in_time() -> None:
    async def test() -> None:
        async def ignore(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await asyncio.sleep(5.0)
            writer.close()

        server = await asyncio.start_server(ignore, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        client = SubmitClient(ClientIdentity(client_id="front", secret=SECRET, subscribes=False))
        with pytest.raises(HandshakeFailed, match=r"no welcome from .* within 0\.1 s"):
            await client.connect(host, port, timeout_s=0.1)
        with pytest.raises(SubmitRefused, match="no connection"):
            await client.submit("router", request("a"))
        server.close()

    run(test())


async def connected(group: FakeGroup, lost: list[str], dead_after_s: float) -> SubmitClient:
    """A front whose reasons for the end of its connection go to `lost`."""
    identity = ClientIdentity(client_id="front", secret=SECRET, subscribes=False)
    client = SubmitClient(identity, on_lost=lost.append, dead_after_s=dead_after_s)
    await client.connect(group.address.host, group.address.port)
    return client


def test_a_front_hears_of_a_rank_0_that_falls_silent() -> None:
    """A stopped process keeps its connections: only the heartbeats that do not come tell."""

    async def test() -> None:
        async with serving(ServerLimits(heartbeat_s=60.0)) as group:
            lost: list[str] = []
            client = await connected(group, lost, dead_after_s=0.2)
            assert client.is_open
            await until(lambda: lost != [])
            assert re.fullmatch(r"silent for 0\.[2-9] s", lost[0])
            with pytest.raises(SubmitRefused, match="no connection"):
                await client.submit("router", request("a"))

    run(test())


def test_a_front_keeps_a_rank_0_that_beats() -> None:
    async def test() -> None:
        async with serving(ServerLimits(heartbeat_s=0.05)) as group:
            lost: list[str] = []
            client = await connected(group, lost, dead_after_s=0.3)
            await asyncio.sleep(0.8)
            assert (lost, client.is_open) == ([], True)
            client.close()

    run(test())
