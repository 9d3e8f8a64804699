"""Places requests on groups and streams their tokens back: `router.dispatch.Dispatcher` over sockets.

A request: rank the ready groups -> hand it over through `send`, which says who took it -> read its stream.
Handing over fails: the next group, under a new wire id, a bounded number of times. The group dies after it
has taken the request: an ERROR chunk for every choice that had not ended. The reader leaves: ABORT.

One attempt owns a stream: it belongs to the link that first delivers for its wire id or that is known to have
taken it. What any other link says of it, or says of a request that nobody waits for, is answered by ABORT.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from router.dispatch import Decision, GroupState, Unavailable
from router.groups import CanaryFailed, GroupLimits, GroupSource, GroupTable
from router.link import GroupLink
from router.placement import Placement, hash_prompt
from router.policy import PolicyConfig
from router.prefix_index import PrefixIndex
from router.streams import RequestStream
from workers.channel import ClientIdentity
from workers.types import (
    FinishReason,
    GenerateRequest,
    GroupId,
    RequestId,
    Role,
    SamplingParams,
    TokenChunk,
)

_log = logging.getLogger(__name__)

# Hands a request to one of the groups, best first: (group ids, client id, request) -> who has it.
# Any exception means that nobody is known to have it; Unavailable is passed on when no group is left to try.
Send = Callable[[Sequence[GroupId], str, GenerateRequest], Awaitable[GroupId]]

_CANARY_PRIORITY = -1_000_000  # before all else: it asks whether the group computes, not whether it is busy


class SendFailed(Exception):
    """No group is known to have taken the request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchLimits:
    """Times and sizes of placing requests."""

    max_attempts: int = 3  # groups a request is offered to
    send_timeout_s: float = 5.0  # for a group to take a request; then the next one is asked
    late_send_s: float = 60.0  # how long a handing-over that was given up may still run
    max_decisions: int = 1024  # kept for `explain`
    groups: GroupLimits = field(default_factory=GroupLimits)


@dataclass(slots=True, eq=False)
class _Attempt:
    """One offer of a request to the groups."""

    wire_id: RequestId
    stream: RequestStream
    # As they were when it was sent: a group forgets what it has taken when this router connects to it again.
    links: Mapping[GroupId, GroupLink]
    target: GroupLink  # the first choice, charged with it
    taken: asyncio.Future[None]
    owner: GroupLink | None = None


class SocketDispatcher:
    """Implements Dispatcher. Lives on the router's event loop; `start` before the first request."""

    def __init__(
        self,
        *,
        secret: bytes,
        source: GroupSource,
        send: Send,
        policy: PolicyConfig | None = None,
        limits: DispatchLimits | None = None,
        client_id: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.client_id = client_id or f"router-{uuid.uuid4().hex}"
        self.index = PrefixIndex(clock=clock)  # what is cached where: to read, not to change
        self._send = send
        self._limits = limits or DispatchLimits()
        self._clock = clock
        self._placement = Placement(
            index=self.index,
            policy=policy or PolicyConfig(),
            clock=clock,
            max_decisions=self._limits.max_decisions,
        )
        self._attempts: dict[RequestId, _Attempt] = {}
        self._sends: set[asyncio.Task[None]] = set()
        self._table = GroupTable(
            source=source,
            identity=ClientIdentity(client_id=self.client_id, secret=secret, subscribes=True),
            index=self.index,
            sink=self,
            canary=self._prove,
            limits=self._limits.groups,
        )

    async def start(self) -> None:
        """Begins to follow the groups."""
        await self._table.start()

    async def stop(self) -> None:
        """Ends all requests with an error and leaves the groups. May be called twice."""
        for attempt in list(self._attempts.values()):
            attempt.stream.fail("router_stopping", "the router is stopping")
        await self._table.stop()
        for task in list(self._sends):
            task.cancel()
        await asyncio.gather(*self._sends, return_exceptions=True)

    def groups(self) -> Sequence[GroupState]:
        """All groups known now, ready or not."""
        return self._table.states()

    def explain(self, request_id: RequestId) -> Decision | None:
        """See `Dispatcher.explain`. The last `max_decisions` requests are remembered."""
        return self._placement.explain(request_id)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """See `Dispatcher.generate`."""
        attempt = await self._place(request)
        stream = attempt.stream
        try:
            while stream.has_pending or not stream.is_finished:
                for chunk in await stream.take():
                    yield chunk
        finally:
            self._finish(attempt)

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
            if chunk.token_ids:  # a refusal says nothing of how fast the group computes
                link.load.on_token(attempt.wire_id, self._clock())
            attempt.stream.push(chunk)
            if attempt.stream.was_cut:
                link.abort(attempt.wire_id)

    def on_link_closed(self, link: GroupLink, reason: str) -> None:
        """A group is gone: what it was running for us ends with an error."""
        for attempt in list(self._attempts.values()):
            if attempt.owner is link:
                attempt.stream.fail("group_failed", _gone(link, reason))

    # ---- one request

    async def _place(self, request: GenerateRequest) -> _Attempt:
        """Finds a group that takes the request. Raises Unavailable."""
        tried: set[GroupId] = set()
        refusal: Unavailable | None = None
        for number in range(1, self._limits.max_attempts + 1):
            chains = await hash_prompt(request, {link.info.block_size for link in self._table.ready_links()})
            links = {
                link.info.group_id: link
                for link in self._table.ready_links()
                if link.info.role is Role.UNIFIED and link.info.group_id not in tried
            }
            if not links:
                break
            decision = self._placement.choose(request, chains, links, number)
            best = links[decision.ranked[0].group_id]
            wire_id = request.request_id if number == 1 else RequestId(f"{request.request_id}~{number}")
            attempt = self._open(request, wire_id, best)
            try:
                self._placement.charge(decision, wire_id, chains, best)
                await self._offer(attempt, request, [choice.group_id for choice in decision.ranked])
            except Exception as error:  # whatever the transport raises: this group does not have it
                self._finish(attempt)
                _log.warning("request %s: %s did not take it: %r", wire_id, best.info.group_id, error)
                tried.add(best.info.group_id)
                refusal = error if isinstance(error, Unavailable) else refusal
                continue
            except BaseException:  # cancelled
                self._finish(attempt)
                raise
            decision.taken_by = attempt.owner.info.group_id if attempt.owner is not None else None
            return attempt
        tries = f" ({len(tried)} did not take it)" if tried else ""
        raise refusal or Unavailable(
            f"no worker group can take the request now{tries}", code="no_healthy_group", retry_after_s=2.0
        )

    def _open(self, request: GenerateRequest, wire_id: RequestId, target: GroupLink) -> _Attempt:
        """From now on tokens of this wire id are welcome: they may come before `send` returns."""
        assert wire_id not in self._attempts, f"request id {wire_id} is in use"
        stream = RequestStream(request)
        taken = asyncio.get_running_loop().create_future()
        links = self._table.links()
        attempt = _Attempt(wire_id=wire_id, stream=stream, links=links, target=target, taken=taken)
        self._attempts[wire_id] = attempt
        return attempt

    async def _offer(self, attempt: _Attempt, request: GenerateRequest, order: Sequence[GroupId]) -> None:
        """Hands the request over; returns when a group has it. Raises what `send` raises, or SendFailed."""
        wired = replace(request, request_id=attempt.wire_id)
        sending = asyncio.get_running_loop().create_task(self._hand_over(attempt, wired, order))
        self._sends.add(sending)
        sending.add_done_callback(self._handed_over)
        done, _ = await asyncio.wait(
            {sending, attempt.taken},
            timeout=self._limits.send_timeout_s,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if attempt.owner is not None:
            return
        if sending in done:
            sending.result()
        raise SendFailed(f"no answer within {self._limits.send_timeout_s:g} s")

    async def _hand_over(self, attempt: _Attempt, request: GenerateRequest, order: Sequence[GroupId]) -> None:
        """Runs to its end even when nobody waits any more: who has taken the request must be told to stop."""
        async with asyncio.timeout(self._limits.late_send_s):
            group_id = await self._send(order, self.client_id, request)
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

    def _take(self, attempt: _Attempt, link: GroupLink) -> None:
        """The link's group has the request."""
        link.load.on_accepted(attempt.wire_id)
        if attempt.owner is not None:
            return
        attempt.owner = link
        attempt.taken.set_result(None)
        if link is not attempt.target:
            attempt.target.load.on_ended(attempt.wire_id)
        if link.closed.done():
            attempt.stream.fail("group_failed", _gone(link, link.closed.result()))

    def _finish(self, attempt: _Attempt) -> None:
        """Nobody reads this attempt any more."""
        self._attempts.pop(attempt.wire_id, None)
        attempt.target.load.on_ended(attempt.wire_id)
        holder = attempt.owner or attempt.target  # if it was given up, it may still come there
        if not attempt.stream.is_finished or attempt.stream.was_cut:
            holder.abort(attempt.wire_id)

    async def _prove(self, link: GroupLink) -> None:
        """Asks a group for one token, on the way that every request takes. Raises CanaryFailed."""
        group_id = link.info.group_id
        request = GenerateRequest(
            request_id=RequestId(f"canary-{uuid.uuid4().hex}"),
            prompt_token_ids=(0,),
            sampling=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
            priority=_CANARY_PRIORITY,
        )
        attempt = self._open(request, request.request_id, link)
        try:
            await self._offer(attempt, request, [group_id])
            if attempt.owner is not link:
                raise CanaryFailed("another group answered")
            for chunk in await attempt.stream.take():
                if chunk.finish_reason is FinishReason.ERROR or not chunk.token_ids:
                    raise CanaryFailed(chunk.error or "an answer without a token")
        except CanaryFailed:
            raise
        except Exception as error:  # whatever the transport raises
            raise CanaryFailed(f"it did not take the request: {error!r}") from error
        finally:
            self._finish(attempt)


def _gone(link: GroupLink, reason: str) -> str:
    return f"worker group {link.info.group_id} failed: {reason}"
