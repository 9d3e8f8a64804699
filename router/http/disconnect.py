"""Answers that stop when the client leaves: generating races against the disconnect.

A server that only notices on writing would compute a non-streaming answer, or one still in the queue, for
nobody. So every generation runs as a task beside one that waits for the disconnect; whichever ends first
ends the other, and cancelling the generation cancels on the group.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.api.errors import ApiError, internal_error
from router.api.json_body import ClientDisconnected
from router.serving.answers import KEEP_ALIVE, error_event
from router.tasks import end_tasks

Result = TypeVar("Result")

_EVENT_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies must pass each event at once
]


class Deadline:
    """When the answer to one request must be complete."""

    def __init__(self, max_s: float, clock: Callable[[], float]) -> None:
        """`max_s` from now on. `clock` is monotonic seconds."""
        self._max_s = max_s
        self._clock = clock
        self._ends_at = clock() + max_s

    @property
    def left_s(self) -> float:
        """Time until then; 0 when it is over."""
        return max(self._ends_at - self._clock(), 0.0)

    def error(self) -> ApiError:
        """The answer to a request that has taken too long: 504."""
        return ApiError(
            504,
            f"The request took longer than {self._max_s:g} s.",
            code="deadline_exceeded",
            headers={"x-should-retry": "false"},
        )


async def unless_disconnected(
    work: Coroutine[Any, Any, Result], receive: Receive, deadline: Deadline
) -> Result:
    """The work's result or exception. The work is cancelled, and ClientDisconnected raised, when the client
    goes; ApiError 504 at the deadline."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((task, gone), timeout=deadline.left_s, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if gone.done():
            raise ClientDisconnected
        raise deadline.error()
    finally:
        await end_tasks(task, gone)


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """Times of a stream, seconds."""

    keep_alive_s: float  # longest silence; a comment breaks it
    send_s: float  # a client that takes nothing for so long is gone


class EventStream(Response):
    """Sends the events of a generator as they come.

    The status waits for the first event, so that a refusal is a proper HTTP error; but no longer than the
    keep-alive time, after which a long queue shows as comments. From then on an error is an event, and the
    end.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        limits: StreamLimits,
        deadline: Deadline,
        clock: Callable[[], float],
        refuse: Callable[[ApiError], Response],
        on_error: Callable[[ApiError], None],
    ) -> None:
        """`refuse` makes the answer of an error before the first event, `on_error` hears of one after it."""
        self.status_code = 200
        self.background = None
        self.raw_headers = list(_EVENT_STREAM_HEADERS)
        self._events = events
        self._limits = limits
        self._deadline = deadline
        self._clock = clock
        self._refuse = refuse
        self._on_error = on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI. Raises ClientDisconnected."""
        wire = _Wire(send, self._clock, self._limits.send_s)
        producer = asyncio.create_task(self._produce(wire))
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await self._watch(wire, producer, gone)
        except ClientDisconnected:
            raise
        except Exception as error:
            await end_tasks(producer)  # nothing more may be sent beside the error
            shown = error if isinstance(error, ApiError) else internal_error()
            if wire.has_started:
                self._on_error(shown)
                with suppress(ClientDisconnected):
                    await wire.send_in_time(error_event(shown.body()), more=False)
            elif shown is error:
                await self._refuse(shown)(scope, receive, send)
            if shown is not error:
                raise  # a fault of ours, for the log
        finally:
            await end_tasks(producer, gone)

    async def _watch(self, wire: _Wire, producer: asyncio.Task[None], gone: asyncio.Task[None]) -> None:
        """Until the producer is done. Raises its exception, ClientDisconnected, or ApiError 504."""
        tick_s = self._limits.keep_alive_s / 2
        while True:
            wait_s = min(tick_s, self._deadline.left_s)
            await asyncio.wait((producer, gone), timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            if producer.done():
                return producer.result()
            if gone.done() or wire.is_stuck():
                raise ClientDisconnected
            if not self._deadline.left_s:
                raise self._deadline.error()
            await wire.keep_alive(tick_s)

    async def _produce(self, wire: _Wire) -> None:
        async with aclosing(self._events) as events:
            async for event in events:
                await wire.send(event)
        await wire.send(b"", more=False)  # lets the client use the connection again


class _Wire:
    """The body on its way out, one message at a time. A client that does not take one within `send_s` has
    left."""

    def __init__(self, send: Send, clock: Callable[[], float], send_s: float) -> None:
        self._send = send
        self._clock = clock
        self._send_s = send_s
        self._sending = asyncio.Lock()
        self._last_at = clock()  # when the last message was begun, or taken
        self.has_started = False

    async def send(self, event: bytes, *, more: bool = True) -> None:
        """Sends an event, with the status before the first one. For as long as it takes: a timer for each
        token would cost ten times as much as sending it; somebody else watches `is_stuck`."""
        async with self._sending:
            self._last_at = self._clock()
            if not self.has_started:
                self.has_started = True
                start = {"type": "http.response.start", "status": 200, "headers": list(_EVENT_STREAM_HEADERS)}
                await self._send(start)
            await self._send({"type": "http.response.body", "body": event, "more_body": more})
            self._last_at = self._clock()

    async def send_in_time(self, event: bytes, *, more: bool = True) -> None:
        """As `send`, for who watches and is not watched. Raises ClientDisconnected."""
        try:
            async with asyncio.timeout(self._send_s):
                await self.send(event, more=more)
        except TimeoutError:
            raise ClientDisconnected from None

    async def keep_alive(self, idle_s: float) -> None:
        """Sends a comment when nothing has been sent for `idle_s`. Raises ClientDisconnected."""
        if not self._sending.locked() and self._clock() - self._last_at >= idle_s:
            await self.send_in_time(KEEP_ALIVE)

    def is_stuck(self) -> bool:
        """Whether a message has been on its way for longer than `send_s`."""
        return self._sending.locked() and self._clock() - self._last_at > self._send_s


async def _disconnected(receive: Receive) -> None:
    """Returns when the client has closed its side."""
    while (await receive())["type"] != "http.disconnect":
        pass
