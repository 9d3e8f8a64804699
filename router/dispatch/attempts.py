"""Requests that are at groups, or on their way there: one attempt is one offer of a request, under a wire id
of its own.

An attempt owns a stream, which belongs to the link that first delivers for its wire id or that is known to
have taken it. What any other link says of it, or says of a request that nobody waits for, is answered by
ABORT.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from router.dispatch.link import GroupLink
from router.dispatch.streams import RequestStream
from router.tasks import end_tasks
from workers.types import FinishReason, GenerateRequest, GroupId, RequestId, TokenChunk

_log = logging.getLogger(__name__)

STOPPED = "group_stopped"  # error code of what a group left unfinished that ended as planned
DISTRUSTED = "group_distrusted"  # of one that ended by itself, as it computed wrongly
CRASHED = frozenset({"group_failed", "engine_dead"})  # and of one that did not end so

# Hands a request to one of the groups, best first: (group ids, client id, request) -> who has it.
# Any exception means that nobody is known to have it.
Send = Callable[[Sequence[GroupId], str, GenerateRequest], Awaitable[GroupId]]


class SendFailed(Exception):
    """No group is known to have taken the request."""


class AnswerListener(Protocol):
    """Who wants to hear when an answer begins, and that it has ended."""

    def on_first(self, link: GroupLink, chunk: TokenChunk) -> TokenChunk:
        """The first chunk of choice 0, as the group sent it; returns what the reader gets."""
        ...

    def on_over(self) -> None:
        """Nobody reads the answer any more."""
        ...


@dataclass(slots=True, eq=False)
class Attempt:
    """One offer of a request to the groups."""

    wire_id: RequestId
    stream: RequestStream
    # As they were when it was sent: a group forgets what it has taken when this router connects to it again.
    links: Mapping[GroupId, GroupLink]
    target: GroupLink  # the first choice, charged with it until another has taken it
    taken: asyncio.Future[None]
    begun: asyncio.Future[None]  # the group has computed something of it
    owner: GroupLink | None = None
    listener: AnswerListener | None = None
    has_begun: bool = False  # the listener has heard


class Attempts:
    """All attempts of a router; implements `link.TokenSink`. Lives on the router's event loop."""

    def __init__(
        self,
        *,
        send: Send,
        client_id: str,
        links: Callable[[], Mapping[GroupId, GroupLink]],
        clock: Callable[[], float],
        send_timeout_s: float,
        late_send_s: float,
    ) -> None:
        """`links` are those to all groups there are. `send_timeout_s` is for a group to take a request,
        `late_send_s` how long a handing-over that was given up may still run."""
        self._send = send
        self._client_id = client_id
        self._links = links
        self._clock = clock
        self._send_timeout_s = send_timeout_s
        self._late_send_s = late_send_s
        self._attempts: dict[RequestId, Attempt] = {}
        self._sends: set[asyncio.Task[None]] = set()

    def fail_all(self, code: str, message: str) -> None:
        """Ends all streams with an error."""
        for attempt in list(self._attempts.values()):
            attempt.stream.fail(code, message)

    async def stop(self) -> None:
        """Gives up what is being handed over. May be called twice."""
        await end_tasks(*self._sends)

    # ---- from the links

    def on_chunks(self, link: GroupLink, chunks: Sequence[TokenChunk]) -> None:
        """Tokens of one step of a group."""
        for chunk in chunks:
            attempt = self._attempts.get(chunk.request_id)
            if attempt is None or attempt.owner not in (None, link):
                link.abort(chunk.request_id)
                continue
            if attempt.owner is None:
                self._take(attempt, link)
            if has_begun(chunk):  # a refusal says nothing of how fast it computes
                link.load.on_token(attempt.wire_id, self._clock())
                if not attempt.begun.done():
                    attempt.begun.set_result(None)
            if attempt.listener is not None and not attempt.has_begun and chunk.choice == 0:
                attempt.has_begun = True
                chunk = attempt.listener.on_first(link, chunk)
            attempt.stream.push(chunk)
            if attempt.stream.was_cut:
                link.abort(attempt.wire_id)

    def on_link_closed(self, link: GroupLink, reason: str) -> None:
        """A group is gone: what it was running for us ends with an error."""
        for attempt in list(self._attempts.values()):
            if attempt.owner is link:
                _fail(attempt.stream, link, reason)

    # ---- one attempt

    def open(self, request: GenerateRequest, wire_id: RequestId, target: GroupLink) -> Attempt:
        """From now on tokens of this wire id are welcome: they may come before `send` returns."""
        assert wire_id not in self._attempts, f"request id {wire_id} is in use"
        loop = asyncio.get_running_loop()
        attempt = Attempt(
            wire_id=wire_id,
            stream=RequestStream(request),
            links=self._links(),
            target=target,
            taken=loop.create_future(),
            begun=loop.create_future(),
        )
        self._attempts[wire_id] = attempt
        return attempt

    async def offer(self, attempt: Attempt, request: GenerateRequest, order: Sequence[GroupId]) -> None:
        """Hands the request over; returns when a group has it. Raises what `send` raises, or SendFailed."""
        wired = replace(request, request_id=attempt.wire_id)
        sending = asyncio.get_running_loop().create_task(self._hand_over(attempt, wired, order))
        self._sends.add(sending)
        sending.add_done_callback(self._handed_over)
        done, _ = await asyncio.wait(
            {sending, attempt.taken},
            timeout=self._send_timeout_s,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if attempt.owner is not None:
            return
        if sending in done:
            sending.result()
        raise SendFailed(f"no answer within {self._send_timeout_s:g} s")

    async def ask(
        self, link: GroupLink, request: GenerateRequest, listener: AnswerListener | None = None
    ) -> TokenChunk:
        """The first chunk of a request of one choice, from this group alone; what is left of the request is
        aborted. Raises as `offer` does, and SendFailed when another group took it."""
        attempt = self.open(request, request.request_id, link)
        attempt.listener = listener
        try:
            await self.offer(attempt, request, [link.info.group_id])
            if attempt.owner is not link:
                raise SendFailed("another group answered")
            return (await attempt.stream.take())[0]
        finally:
            self.finish(attempt)

    def finish(self, attempt: Attempt) -> None:
        """Nobody reads this attempt any more."""
        self._attempts.pop(attempt.wire_id, None)
        holder = attempt.owner or attempt.target  # if it was given up, it may still come there
        holder.load.on_ended(attempt.wire_id)
        if not attempt.stream.is_finished or attempt.stream.was_cut:
            holder.abort(attempt.wire_id)
        if attempt.listener is not None:
            attempt.listener.on_over()

    async def _hand_over(self, attempt: Attempt, request: GenerateRequest, order: Sequence[GroupId]) -> None:
        """Runs to its end even when nobody waits any more: who has taken the request must be told to stop."""
        async with asyncio.timeout(self._late_send_s):
            group_id = await self._send(order, self._client_id, request)
        link = attempt.links.get(group_id)
        if link is None:
            raise SendFailed(f"taken by {group_id}, to which this router had no connection")
        if attempt.wire_id not in self._attempts or attempt.owner not in (None, link):
            link.abort(attempt.wire_id)
            return
        self._take(attempt, link)

    def _handed_over(self, sending: asyncio.Task[None]) -> None:
        self._sends.discard(sending)
        if not sending.cancelled() and (error := sending.exception()) is not None:
            _log.debug("handing over failed: %r", error)  # whoever still waited for it has it too

    def _take(self, attempt: Attempt, link: GroupLink) -> None:
        """The link's group has the request."""
        if attempt.owner is None:
            attempt.owner = link
            attempt.taken.set_result(None)
            if link is not attempt.target:
                attempt.target.load.hand_over(attempt.wire_id, link.load)
            if link.closed.done():
                _fail(attempt.stream, link, link.closed.result())
        link.load.on_accepted(attempt.wire_id)


def _fail(stream: RequestStream, link: GroupLink, reason: str) -> None:
    """The group that the stream comes from is gone."""
    if link.was_stopped:
        stream.fail(STOPPED, f"worker group {link.info.group_id} was stopped: {reason}")
    else:
        stream.fail("group_failed", f"worker group {link.info.group_id} failed: {reason}")


def has_begun(chunk: TokenChunk) -> bool:
    """Whether its group has computed the prompt."""
    return bool(chunk.token_ids) or chunk.times is not None or is_computed(chunk)


def is_computed(chunk: TokenChunk) -> bool:
    """Whether it ends a request whose prompt has been computed."""
    return chunk.finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
