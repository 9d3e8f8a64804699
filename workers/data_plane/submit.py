"""The front's side of the data plane: hands requests to rank 0 and learns whether the engine took them.

Tokens do not come back here; they go to the connection of the router that the request belongs to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from workers.data_plane.channel import Channel, ClientIdentity, HandshakeFailed, SilenceCheck, connect
from workers.data_plane.wire import Accepted, Goodbye, Message, Ping, Pong, Refused, Stats, Submit, WireError
from workers.report import GroupReport
from workers.tasks import start_task
from workers.types import GenerateRequest, GroupInfo, GroupStats, RequestId

DEAD_AFTER_S = 10.0  # rank 0 sends a heartbeat every second; silent for longer, it is gone
_CHECK_PERIOD_S = 1.0
_SUBMIT_TIMEOUT_S = 3.0


class SubmitRefused(Exception):
    """The group did not take the request. `code`: client_not_connected, duplicate_request, aborted,
    invalid_value, group_failed, group_draining, not_connected, submit_timeout, invalid_request."""

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message)
        self.message = message
        self.code = code

    def __reduce__(self) -> tuple[Callable[[str, str], SubmitRefused], tuple[str, str]]:
        return _rebuild_refusal, (self.message, self.code)  # crosses processes in a Serve handle's answer


def _rebuild_refusal(message: str, code: str) -> SubmitRefused:
    return SubmitRefused(message, code=code)


class SubmitClient:
    """A connection to rank 0 that submits. One per front; not thread-safe."""

    def __init__(
        self,
        identity: ClientIdentity,
        *,
        on_lost: Callable[[str], None] | None = None,
        dead_after_s: float = DEAD_AFTER_S,
    ) -> None:
        """`on_lost` hears once, with the reason, that the connection ended, also for mere silence."""
        self._identity = identity
        self._on_lost = on_lost
        self._dead_after_s = dead_after_s
        self._watch: asyncio.Task[None] | None = None
        self._channel: Channel | None = None
        self._answers: dict[RequestId, asyncio.Future[None]] = {}
        self._stats = GroupStats()
        self._report = GroupReport()
        self._goodbye = ""  # rank 0's last words; the end of the connection follows

    async def connect(self, host: str, port: int, timeout_s: float = 5.0) -> GroupInfo:
        """Connects and greets; afterwards requests can be submitted. Raises HandshakeFailed."""
        if self.is_open:
            raise HandshakeFailed("this client is connected already")
        self._channel, info = await connect(
            host,
            port,
            self._identity,
            on_message=self._message,
            on_closed=self._closed,
            timeout_s=timeout_s,
        )
        self._watch = start_task(self._watch_silence(self._channel), "the check for silence of rank 0")
        return info

    @property
    def is_open(self) -> bool:
        """Whether requests can be submitted."""
        return self._channel is not None and self._channel.is_open

    @property
    def stats(self) -> GroupStats:
        """Load of the group, at most a heartbeat old while the group lives."""
        return self._stats

    @property
    def report(self) -> GroupReport:
        """What the group has counted, as of a heartbeat."""
        return self._report

    async def submit(self, client_id: str, request: GenerateRequest) -> None:
        """Hands the request to the engine; returns when the engine has it. Raises SubmitRefused.

        After a timeout the group may still take it: then its tokens reach the router, which aborts them.
        """
        channel = self._channel
        if channel is None or not channel.is_open:
            raise SubmitRefused("no connection to rank 0 of the group", code="not_connected")
        if request.request_id in self._answers:
            raise SubmitRefused(f"request {request.request_id} is being submitted", code="duplicate_request")
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._answers[request.request_id] = answer
        try:
            channel.send(Submit(client_id=client_id, request=request))
            async with asyncio.timeout(_SUBMIT_TIMEOUT_S):
                await answer
        except WireError as error:
            raise SubmitRefused(str(error), code="invalid_request") from error
        except TimeoutError as error:
            message = f"rank 0 did not answer within {_SUBMIT_TIMEOUT_S:g} s"
            raise SubmitRefused(message, code="submit_timeout") from error
        finally:
            self._answers.pop(request.request_id, None)

    def close(self) -> None:
        """Ends the connection; submissions under way are refused."""
        if self._channel is not None:
            self._channel.close("the front closed the connection")

    async def _watch_silence(self, channel: Channel) -> None:
        """Drops a connection that is silent for too long: a stopped process does not close it."""
        loop, period_s = asyncio.get_running_loop(), min(_CHECK_PERIOD_S, self._dead_after_s / 4)
        silence = SilenceCheck(period_s)
        while channel.is_open:
            await asyncio.sleep(period_s)
            now_s = loop.time()
            silent_s = now_s - channel.heard_s
            if silence.may_judge(now_s) and silent_s > self._dead_after_s and channel.is_open:
                channel.drop(f"silent for {silent_s:.1f} s")

    def _message(self, channel: Channel, message: Message) -> None:
        match message:
            case Accepted():
                self._settle(message.request_id, None)
            case Refused():
                self._settle(message.request_id, SubmitRefused(message.message, code=message.code))
            case Stats():
                self._stats = message.stats
                self._report = message.report or self._report
            case Ping():
                channel.send(Pong())
            case Goodbye():
                self._goodbye = message.reason
            case _:  # WELCOME
                pass

    def _settle(self, request_id: RequestId, refusal: SubmitRefused | None) -> None:
        answer = self._answers.get(request_id)
        if answer is None or answer.done():
            return
        if refusal is None:
            answer.set_result(None)
        else:
            answer.set_exception(refusal)

    def _closed(self, _channel: Channel, reason: str) -> None:
        reason = self._goodbye or reason
        if self._watch is not None:
            self._watch.cancel()
        for request_id in list(self._answers):
            self._settle(request_id, SubmitRefused(f"rank 0 is gone: {reason}", code="group_failed"))
        if self._on_lost is not None:
            self._on_lost(reason)
