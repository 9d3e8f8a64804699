"""Streams whose client goes, or stays and takes nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, MutableMapping
from typing import Any

import pytest
from starlette.responses import Response

from router.api.errors import ApiError
from router.api.json_body import ClientDisconnected
from router.http.disconnect import Deadline, EventStream, StreamLimits
from router.serving.answers import KEEP_ALIVE


class Client:
    """The server's side of a connection. `takes`: messages it accepts before it blocks."""

    def __init__(self, takes: int) -> None:
        self.messages: list[MutableMapping[str, Any]] = []
        self.errors: list[ApiError] = []
        self.num_left = 0
        self._takes = takes

    async def send(self, message: MutableMapping[str, Any]) -> None:
        if len(self.messages) >= self._takes:
            await asyncio.Event().wait()
        self.messages.append(message)

    async def receive(self) -> MutableMapping[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError("a client that stays says nothing")

    def bodies(self) -> list[bytes]:
        return [message["body"] for message in self.messages[1:]]


class Events:
    """Gives some events, then waits; knows whether it was closed."""

    def __init__(self, *events: bytes, ends: bool = False) -> None:
        self.is_closed = False
        self._events = events
        self._ends = ends

    async def __call__(self) -> AsyncGenerator[bytes, None]:
        try:
            for event in self._events:
                yield event
            if not self._ends:
                await asyncio.Event().wait()
        finally:
            self.is_closed = True


def run(client: Client, events: Events, *, max_s: float = 60.0, keep_alive_s: float = 0.04) -> None:
    def refuse(_: ApiError) -> Response:
        raise AssertionError("the stream has begun")

    stream = EventStream(
        events(),
        limits=StreamLimits(keep_alive_s, send_s=0.1),
        deadline=Deadline(max_s, time.monotonic),
        clock=time.monotonic,
        refuse=refuse,
        on_error=client.errors.append,
    )
    try:
        asyncio.run(asyncio.wait_for(stream({"type": "http"}, client.receive, client.send), 10))
    except ClientDisconnected:
        client.num_left += 1
    assert events.is_closed


def test_a_whole_stream() -> None:
    client, events = Client(takes=100), Events(b"a", b"b", ends=True)
    run(client, events)
    assert client.bodies() == [b"a", b"b", b""]
    assert [message.get("more_body") for message in client.messages] == [None, True, True, False]
    assert (client.num_left, client.errors) == (0, [])


@pytest.mark.parametrize("takes", [0, 1, 2])
def test_a_client_that_takes_no_event_has_left(takes: int) -> None:
    client, events = Client(takes), Events(b"a", b"b", b"c")
    run(client, events)
    assert client.bodies() == [b"a", b"b", b"c"][: max(takes - 1, 0)]
    assert (client.num_left, client.errors) == (1, [])


def test_a_client_that_takes_no_comment_has_left() -> None:
    client, events = Client(takes=3), Events(b"a")
    run(client, events)
    assert client.bodies() == [b"a", KEEP_ALIVE]
    assert (client.num_left, client.errors) == (1, [])


def test_an_error_that_the_client_does_not_take_ends_the_stream() -> None:
    client, events = Client(takes=2), Events(b"a")
    run(client, events, keep_alive_s=0.4, max_s=0.05)
    assert client.bodies() == [b"a"]
    assert [error.code for error in client.errors] == ["deadline_exceeded"]
