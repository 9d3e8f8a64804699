"""Places requests on groups and streams their tokens back: `interface.Dispatcher` over sockets.

A request: rank the ready groups -> hand it over through `send`, which says who took it -> read its stream.
Handing over fails: the next group, under a new wire id, a bounded number of times. The group ends after it
has taken the request: it goes on in another one (`journey`), or an ERROR chunk comes for every choice that
had not ended. The reader leaves: ABORT.

What is at a group is `attempts`; a request that reads KV blocks from a second group, which may have to
compute them first, is followed by `fetching`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace

from router.dispatch.attempts import Attempt, Attempts, Send, SendFailed
from router.dispatch.fetching import Fetcher
from router.dispatch.groups import CanaryFailed, GroupLimits, GroupSource, GroupTable
from router.dispatch.interface import (
    Decision,
    FetchCounts,
    GroupState,
    MoveResult,
    PairState,
    RetryReason,
    RouteCounts,
    Unavailable,
)
from router.dispatch.journey import MAX_SUSPICIONS, Journey, Probation
from router.dispatch.link import GroupLink
from router.dispatch.placement import Placement, hash_prompt
from router.routing.policy import PolicyConfig
from router.routing.prefix_index import PrefixIndex
from workers.data_plane.channel import ClientIdentity
from workers.data_plane.submit import SubmitRefused
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

_POLL_S = 0.1  # of waiting for a group
_ASK_AGAIN_S = 1.0  # those that have refused: every question costs a placement, and may begin a prefill
_CANARY_PRIORITY = -1_000_000  # before all else: it asks whether the group computes, not whether it is busy


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchLimits:
    """Times and sizes of placing requests."""

    max_attempts: int = 3  # groups a request is offered to
    send_timeout_s: float = 5.0  # for a group to take a request; then the next one is asked
    late_send_s: float = 60.0  # how long a handing-over that was given up may still run
    group_wait_s: float = 0.0  # of a request, for the first group of pools that may be at zero
    start_wait_s: float = 20.0  # of a request, for one that is being started
    successor_s: float = 6.0  # after a group has left, for another that is started in its place to be known
    max_decisions: int = 1024  # kept for `explain`
    max_moves: int = 3  # of a request after crashes; after planned ends as often as it takes
    move_wait_s: float = 60.0  # after a crash, for a group to be there that goes on with it
    stopped_wait_s: float = 2.0  # the same after a planned end, when none is being started
    groups: GroupLimits = field(default_factory=GroupLimits)


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
        model_hash: str | None = None,
        wake: Callable[[], None] | None = None,
        is_one_coming: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """model_hash: of the groups to use (`GroupInfo`); None: all are of one model. `wake` is called again
        and again while a request waits for a group of pools at zero: it asks for one. `is_one_coming`: a
        group that will answer is being started."""
        self.client_id = client_id or f"router-{uuid.uuid4().hex}"
        self.index = PrefixIndex(clock=clock)  # what is cached where: to read, not to change
        self._limits = limits or DispatchLimits()
        self._wake = wake
        self._is_one_coming = is_one_coming
        self._is_stopped = False
        self._probation = Probation()
        self._clock = clock
        self._counts = RouteCounts()
        self._placement = Placement(
            index=self.index,
            policy=policy or PolicyConfig(),
            clock=clock,
            max_decisions=self._limits.max_decisions,
        )
        self._attempts = Attempts(
            send=send,
            client_id=self.client_id,
            links=lambda: self._table.links(),
            clock=clock,
            send_timeout_s=self._limits.send_timeout_s,
            late_send_s=self._limits.late_send_s,
        )
        self._fetcher = Fetcher(
            placement=self._placement,
            attempts=self._attempts,
            ready=self._ready,
            new_transfer_id=lambda: secrets.token_hex(16),
            max_attempts=self._limits.max_attempts,
        )
        self._table = GroupTable(
            source=source,
            identity=ClientIdentity(client_id=self.client_id, secret=secret, subscribes=True),
            index=self.index,
            sink=self,
            canary=self._prove,
            limits=self._limits.groups,
            model_hash=model_hash,
        )

    async def start(self) -> None:
        """Begins to follow the groups."""
        await self._table.start()

    async def settle(self, timeout_s: float) -> None:
        """See `GroupTable.settle`. Raises TimeoutError."""
        await self._table.settle(timeout_s)

    async def stop(self) -> None:
        """Ends all requests with an error and leaves the groups. May be called twice."""
        self._is_stopped = True
        self._attempts.fail_all("router_stopping", "the router is stopping")
        await self._fetcher.stop()
        await self._table.stop()
        await self._attempts.stop()

    async def available(self) -> None:
        """See `Dispatcher.available`."""
        await self._available(self._clock())

    async def _available(self, began_s: float) -> None:
        """Waits for a group, from `began_s` on. Raises Unavailable."""
        while not self._can_answer():
            waited_s = self._clock() - began_s
            if waited_s >= self._max_wait_s():
                after = f" after {waited_s:.0f} s of waiting" if waited_s else ""
                message = f"No worker group is there{after}."
                raise Unavailable(message, code="no_ready_group", retry_after_s=5.0)
            if self._wake is not None and self._limits.group_wait_s:
                self._wake()
            await asyncio.sleep(_POLL_S)

    def groups(self) -> Sequence[GroupState]:
        """All groups known now, ready or not."""
        return self._table.states()

    def pairs(self) -> Sequence[PairState]:
        """See `Dispatcher.pairs`."""
        return self._placement.pairs.states()

    def fetch_counts(self) -> FetchCounts:
        """See `Dispatcher.fetch_counts`."""
        return self._fetcher.counts

    def route_counts(self) -> RouteCounts:
        """See `Dispatcher.route_counts`."""
        counts, index = self._counts, self.index
        counts.decisions = self._placement.reasons
        counts.predicted_tokens = self._placement.predicted_tokens
        counts.index_blocks = index.num_blocks
        counts.index_stored, counts.index_removed = index.num_stored, index.num_removed
        counts.index_gaps = index.num_gaps
        return counts

    def explain(self, request_id: RequestId) -> Decision | None:
        """See `Dispatcher.explain`. The last `max_decisions` requests are remembered."""
        return self._placement.explain(request_id)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """See `Dispatcher.generate`."""
        journey = Journey(request)
        attempt = await self._place_first(request, journey)
        while True:
            stream = attempt.stream
            try:
                while stream.has_pending or not stream.is_finished:
                    for chunk in await stream.take():
                        if (shown := journey.take(chunk)) is not None:
                            yield shown
            finally:
                self._attempts.finish(attempt)
                self._probation.over(journey)
                if not journey.is_lost:
                    _acquit(attempt)
            if journey.is_over:
                return
            journey.end_of_group(attempt)
            try:
                attempt = await self._move(journey)
            except Unavailable as error:
                for chunk in journey.give_up(error.message):
                    yield chunk
                return

    # ---- from the links

    def on_chunks(self, link: GroupLink, chunks: Sequence[TokenChunk]) -> None:
        """Tokens of one step of a group."""
        self._attempts.on_chunks(link, chunks)

    def on_link_closed(self, link: GroupLink, reason: str) -> None:
        """A group is gone."""
        self._placement.pairs.drop(link.address.group_id)
        self._attempts.on_link_closed(link, reason)

    # ---- one request

    def _ready(self) -> dict[GroupId, GroupLink]:
        return {link.info.group_id: link for link in self._table.ready_links()}

    async def _move(self, journey: Journey) -> Attempt:
        """Places a request again whose group has ended. Raises Unavailable when it cannot go on."""
        if journey.num_suspicions >= MAX_SUSPICIONS or journey.num_crashes > self._limits.max_moves:
            self._counts.moves[MoveResult.GIVEN_UP] += 1
            raise Unavailable(f"{journey.num_crashes} groups have failed while they had this request")
        async with self._probation.turn(journey):
            began_s = self._clock()
            try:
                async with asyncio.timeout(self._limits.move_wait_s):
                    attempt = await self._place_again(journey)
            except TimeoutError:
                self._counts.moves[MoveResult.NO_GROUP] += 1
                waited_s = self._clock() - began_s
                raise Unavailable(f"no other group could go on within {waited_s:.0f} s") from None
            if journey.is_suspect:
                self._try(journey, attempt)
        self._counts.moves[MoveResult.MOVED] += 1
        assert attempt.owner is not None
        _log.warning("request %s goes on in group %s", attempt.wire_id, attempt.owner.info.group_id)
        return attempt

    def _try(self, journey: Journey, attempt: Attempt) -> None:
        """A suspect is on trial from now until its group has computed something of it."""
        assert attempt.owner is not None
        attempt.owner.suspect = attempt.wire_id

        def survived(_: asyncio.Future[None]) -> None:
            _acquit(attempt)
            self._probation.over(journey)

        attempt.begun.add_done_callback(survived)

    def _can_answer(self) -> bool:
        return any(link.info.role is not Role.PREFILL for link in self._table.ready_links())

    def _max_wait_s(self) -> float:
        """How long a request waits for a group when none answers, or none takes it."""
        limits, table = self._limits, self._table
        if self._is_stopped:
            return 0.0
        may_come = self._is_expected() or table.since_left_s < limits.successor_s
        if may_come and not table.is_superseded:
            return max(limits.group_wait_s, limits.start_wait_s)
        return limits.group_wait_s

    def _is_expected(self) -> bool:
        """Whether a group that will answer is being started, or has been and is not known to answer yet."""
        return self._is_one_coming() or self._table.is_one_to_prove

    async def _place_first(self, request: GenerateRequest, journey: Journey) -> Attempt:
        """The first placement, which may wait for a group that is being started: when none is there, or none
        that is has taken it, as one that hangs while another is rebuilt. Raises Unavailable."""
        began_s = self._clock()
        while True:
            try:
                return await self._place(request, journey)
            except Unavailable:
                is_refused, max_wait_s = self._can_answer(), self._max_wait_s()
                if self._clock() - began_s >= max_wait_s or (is_refused and not self._is_expected()):
                    raise
            if is_refused:
                await asyncio.sleep(_ASK_AGAIN_S)
            else:
                await self._available(began_s)

    async def _place_again(self, journey: Journey) -> Attempt:
        """Asks until a group takes it. Raises TimeoutError when its group was told to end and none comes in
        its place, as for pools that are taken away."""
        request = journey.move()
        began_s = self._clock()
        while True:
            try:
                return await self._place(request, journey)
            except Unavailable:
                if self._is_stopped:
                    raise
                is_late = self._clock() - began_s >= self._limits.stopped_wait_s
                if journey.was_stopped and is_late and not self._is_expected():
                    raise TimeoutError from None
                await asyncio.sleep(_POLL_S)

    async def _place(self, request: GenerateRequest, journey: Journey) -> Attempt:
        """Finds a group that takes the request, as it is now. Raises Unavailable."""
        began_s = self._clock()
        tried: set[GroupId] = set()
        for _ in range(self._limits.max_attempts):
            chains = await hash_prompt(request, {link.info.block_size for link in self._table.ready_links()})
            ready = self._ready()
            prefill = {key: link for key, link in ready.items() if link.info.role is Role.PREFILL}
            links = {key: link for key, link in ready.items() if key not in tried and key not in prefill}
            if journey.is_suspect:
                prefill = {}
            if not links:
                break
            decision = self._placement.choose(request, chains, links, prefill, is_retry=bool(tried))
            journey.num_attempts += 1
            decision.num_attempts, decision.num_moves = journey.num_attempts, journey.num_moves
            best = links[decision.ranked[0].group_id]
            attempt = self._attempts.open(request, _wire_id(request, journey.num_attempts), best)
            self._placement.charge(decision, attempt.wire_id, chains, best)
            source = self._fetcher.begin(attempt, request, decision, chains)
            decision.route_s = self._clock() - began_s
            order = list(dict.fromkeys(choice.group_id for choice in decision.ranked))
            try:
                await self._attempts.offer(attempt, replace(request, kv_source=source), order)
            except Exception as error:  # whatever the transport raises: this group does not have it
                self._attempts.finish(attempt)
                _log.warning("request %s: %s did not take it: %r", attempt.wire_id, best.info.group_id, error)
                self._counts.retries[_retry_reason(error)] += 1
                tried.add(best.info.group_id)
                continue
            except BaseException:  # cancelled
                self._attempts.finish(attempt)
                raise
            assert attempt.owner is not None
            self._counts.seconds.observe(decision.route_s)
            decision.taken_by = attempt.owner.info.group_id
            return attempt
        tries = f" ({len(tried)} did not take it)" if tried else ""
        raise Unavailable(
            f"no worker group can take the request now{tries}", code="no_healthy_group", retry_after_s=2.0
        )

    async def _prove(self, link: GroupLink) -> None:
        """Asks a group for one token, on the way that every request takes. Raises CanaryFailed."""
        request = GenerateRequest(
            request_id=RequestId(f"canary-{uuid.uuid4().hex}"),
            prompt_token_ids=(0,),
            sampling=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
            priority=_CANARY_PRIORITY,
        )
        try:
            chunk = await self._attempts.ask(link, request)
        except Exception as error:  # whatever the transport raises
            raise CanaryFailed(f"it did not take the request: {error!r}") from error
        if chunk.finish_reason is FinishReason.ERROR or not chunk.token_ids:
            raise CanaryFailed(chunk.error or "an answer without a token")


def _wire_id(request: GenerateRequest, number: int) -> RequestId:
    """What a group knows the request by: each offer has an id of its own, as groups remember aborts."""
    return request.request_id if number == 1 else RequestId(f"{request.request_id}~{number}")


def _acquit(attempt: Attempt) -> None:
    """The group has not died of this request."""
    if attempt.owner is not None and attempt.owner.suspect == attempt.wire_id:
        attempt.owner.suspect = None


def _retry_reason(error: Exception) -> RetryReason:
    if isinstance(error, SubmitRefused):
        return RetryReason.REFUSED
    return RetryReason.NO_ANSWER if isinstance(error, SendFailed) else RetryReason.FAILED
