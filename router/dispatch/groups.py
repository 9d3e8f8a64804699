"""Follows the directory of groups: keeps one link to each, and knows which of them can take requests.

Life of a group here, run by one task per group:

    listed -> connecting -> connected -> ready -> lost -> connecting ...
                 ^ backoff                ^ a canary request has brought a real token over this link

A new epoch or address ends the old link first, so that nothing an old epoch still says is heard. A group
that is no longer listed takes no new requests, finishes what it has, and is then let go. A group of another
model (an update to that model is under way, or from it) is left alone: its tokens mean something else. When
the directory does not answer, the last list stays in force: nothing on the path of a request needs it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from router.dispatch.interface import GroupState
from router.dispatch.link import GroupLink, LinkLimits, TokenSink, open_link
from router.routing.prefix_index import PrefixIndex
from router.tasks import end_tasks
from workers.data_plane.channel import ClientIdentity, HandshakeFailed
from workers.tasks import start_task
from workers.types import GroupAddress, GroupId, GroupInfo, GroupStats, Role

_SETTLE_POLL_S = 0.05
_log = logging.getLogger(__name__)

GroupSource = Callable[[], Awaitable[Sequence[GroupAddress]]]  # the directory's list; may wait for news
Canary = Callable[[GroupLink], Awaitable[None]]  # returns when a real token has come; raises CanaryFailed


class CanaryFailed(Exception):
    """The group did not answer a one-token request. The message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLimits:
    """Times of following groups."""

    poll_s: float = 0.5  # between two questions to the directory
    source_timeout_s: float = 10.0  # for one answer of the directory
    canary_timeout_s: float = 30.0
    backoff_s: float = 0.1  # after the first failed connection or canary; doubles
    max_backoff_s: float = 2.0
    forget_after_s: float = 5.0  # an unlisted group without requests is let go
    link: LinkLimits = field(default_factory=LinkLimits)


class _Follower:
    """Keeps one group connected and proven, if it is of our model."""

    def __init__(self, table: GroupTable, address: GroupAddress) -> None:
        self.address = address
        self.link: GroupLink | None = None
        self.unlisted_s: float | None = None  # loop time since when the directory does not list it
        self.is_foreign = False  # serves another model
        self.has_tried = False  # to connect
        self._table = table
        self._moved = asyncio.Event()
        self._backoff_s = 0.0
        self._task = start_task(self._run(), f"following of group {address.group_id}")

    @property
    def is_eligible(self) -> bool:
        """Whether new requests may go there, were it ready."""
        return self.unlisted_s is None and not self.address.is_draining

    def update(self, address: GroupAddress) -> None:
        """What the directory says of the group now."""
        was_eligible, old, self.address = self.is_eligible, self.address, address
        self.unlisted_s = None
        if was_eligible and not self.is_eligible:
            self._table.note_left()
        if (old.host, old.port, old.epoch) != (address.host, address.port, address.epoch):
            self._moved.set()
            if self.link is not None:
                self.link.close(f"group {address.group_id} has been rebuilt: epoch {address.epoch}")

    async def stop(self) -> None:
        await end_tasks(self._task)
        if self.link is not None:
            self.link.close("the router leaves the group")

    async def _run(self) -> None:
        while True:
            self._moved.clear()
            try:
                await self._follow()
            except Exception:  # a fault of ours, or of the address: the group is not lost for it
                _log.exception("group %s at %s is tried again", self.address.group_id, self.address)
            await self._pause()

    async def _follow(self) -> None:
        """One connection, until it ends or cannot be."""
        try:
            link = await self._table.open(self.address)
        except HandshakeFailed as error:
            _log.info("group %s: %s", self.address.group_id, error)
            return
        finally:
            self.has_tried = True
        self.is_foreign = not self._table.is_ours(link.info)
        if self.is_foreign:
            _log.info("group %s serves another model", self.address.group_id)
            link.close("the router serves another model")
            await self._moved.wait()
            return
        self.link = link
        if self._moved.is_set():  # while it was being opened
            link.close("the group has moved")
        proof = start_task(self._prove(link), f"canary of group {self.address.group_id}")
        try:
            reason = await asyncio.shield(link.closed)
        finally:
            await end_tasks(proof)
        _log.warning("group %s epoch %d lost: %s", self.address.group_id, link.address.epoch, reason)
        self.link = None
        if self.is_eligible:
            self._table.note_left()

    async def _prove(self, link: GroupLink) -> None:
        """Asks for one token until one comes."""
        while link.is_open:
            try:
                async with asyncio.timeout(self._table.limits.canary_timeout_s):
                    await self._table.canary(link)
            except (CanaryFailed, TimeoutError) as error:
                _log.warning("group %s gave no canary token: %s", link.info.group_id, error or "no answer")
                await self._pause()
                continue
            link.is_ready = True
            self._backoff_s = 0.0
            _log.info("group %s epoch %d is ready", link.info.group_id, link.info.epoch)
            return

    async def _pause(self) -> None:
        """Waits longer each time, but not when the group has moved."""
        limits = self._table.limits
        self._backoff_s = min(max(limits.backoff_s, 2 * self._backoff_s), limits.max_backoff_s)
        try:
            async with asyncio.timeout(self._backoff_s):
                await self._moved.wait()
        except TimeoutError:
            return
        self._backoff_s = 0.0


class GroupTable:
    """All groups of the application as this router sees them. Lives on the router's event loop."""

    def __init__(
        self,
        *,
        source: GroupSource,
        identity: ClientIdentity,
        index: PrefixIndex,
        sink: TokenSink,
        canary: Canary,
        limits: GroupLimits,
        model_hash: str | None,
    ) -> None:
        """model_hash: of the groups to follow; None: all are of one model."""
        self.limits = limits
        self.canary = canary
        self._source = source
        self._identity = identity
        self._index = index
        self._sink = sink
        self._model_hash = model_hash
        self._followers: dict[GroupId, _Follower] = {}
        self._poller: asyncio.Task[None] | None = None
        self._has_asked = asyncio.Event()  # the directory has answered, or could not
        self._left_s = float("-inf")  # loop time, see `since_left_s`

    async def start(self) -> None:
        """Begins to follow the directory."""
        assert self._poller is None, "started twice"
        self.note_left()  # whatever was there before this router
        self._poller = start_task(self._poll(), "following of the directory of groups")

    async def stop(self) -> None:
        """Leaves all groups. May be called twice."""
        if self._poller is not None:
            await end_tasks(self._poller)
        await asyncio.gather(*(follower.stop() for follower in self._followers.values()))
        self._followers.clear()

    async def open(self, address: GroupAddress) -> GroupLink:
        """A link to the group. Raises HandshakeFailed."""
        return await open_link(
            address, self._identity, index=self._index, sink=self._sink, limits=self.limits.link
        )

    def is_ours(self, info: GroupInfo) -> bool:
        """Whether a group serves the model of this router."""
        return self._model_hash is None or info.model_hash == self._model_hash

    async def settle(self, timeout_s: float) -> None:
        """Returns when a group of our model is ready, or none of another model takes requests: until then an
        update to our model is under way, and the other model's router serves. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            await self._has_asked.wait()
            while not self.ready_links() and any(  # noqa: ASYNC110 (seconds of waiting, once a start)
                follower.is_foreign or not follower.has_tried
                for follower in self._followers.values()
                if follower.is_eligible
            ):
                await asyncio.sleep(_SETTLE_POLL_S)

    def note_left(self) -> None:
        """A group takes no requests any more."""
        self._left_s = asyncio.get_running_loop().time()

    @property
    def since_left_s(self) -> float:
        """Seconds since a group last stopped taking requests, or since the start."""
        return asyncio.get_running_loop().time() - self._left_s

    @property
    def is_one_to_prove(self) -> bool:
        """A group that is to answer is listed, and has not given a token over its present link yet."""
        return any(
            follower.is_eligible
            and not follower.is_foreign
            and not (follower.link is not None and follower.link.is_ready)
            and follower.address.role is not Role.PREFILL
            for follower in self._followers.values()
        )

    @property
    def is_superseded(self) -> bool:
        """Groups of another model take requests: none of ours will come any more."""
        return any(follower.is_foreign and follower.is_eligible for follower in self._followers.values())

    def ready_links(self) -> list[GroupLink]:
        """Links to groups that can take a new request now."""
        return [
            follower.link
            for follower in self._followers.values()
            if follower.link is not None
            and follower.link.is_open
            and follower.link.is_ready
            and follower.is_eligible
        ]

    def links(self) -> dict[GroupId, GroupLink]:
        """The links there are now, ready or not."""
        return {
            group_id: follower.link
            for group_id, follower in self._followers.items()
            if follower.link is not None
        }

    def states(self) -> list[GroupState]:
        """All groups of our model, in order of their ids; one without a connection shows what the directory
        says."""
        return [
            _state(follower) for _, follower in sorted(self._followers.items()) if not follower.is_foreign
        ]

    def update(self, addresses: Sequence[GroupAddress]) -> None:
        """Takes a new list of the directory."""
        for address in addresses:
            follower = self._followers.get(address.group_id)
            if follower is None:
                self._followers[address.group_id] = _Follower(self, address)
            elif address.epoch >= follower.address.epoch:  # an older one is a late answer
                follower.update(address)
        listed = {address.group_id for address in addresses}
        now_s = asyncio.get_running_loop().time()
        for group_id, follower in self._followers.items():
            if group_id not in listed and follower.unlisted_s is None:
                if follower.is_eligible:
                    self.note_left()
                follower.unlisted_s = now_s

    async def _poll(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self.limits.source_timeout_s):
                    addresses = await self._source()
            except Exception as error:  # whatever the directory's transport raises: the list we have stays
                _log.warning("the directory of groups does not answer: %r", error)
            else:
                self.update(addresses)
            self._has_asked.set()
            await self._let_go()
            await asyncio.sleep(self.limits.poll_s)

    async def _let_go(self) -> None:
        """Forgets groups that have been unlisted for a while and have nothing of ours to finish."""
        now_s = asyncio.get_running_loop().time()
        for group_id, follower in list(self._followers.items()):
            unlisted_s, link = follower.unlisted_s, follower.link
            if unlisted_s is None or now_s - unlisted_s < self.limits.forget_after_s:
                continue
            if link is None or not link.is_open or link.load.num_requests == 0:
                del self._followers[group_id]
                await follower.stop()


def _state(follower: _Follower) -> GroupState:
    link, address = follower.link, follower.address
    if link is not None and link.is_open:
        return GroupState(
            group_id=address.group_id,
            epoch=link.info.epoch,
            info=link.info,
            stats=link.load.stats,
            is_ready=link.is_ready and follower.is_eligible,
            role=address.role,
            is_leaving=address.is_leaving,
            report=link.report,
        )
    return GroupState(
        group_id=address.group_id,
        epoch=address.epoch,
        info=None,
        stats=GroupStats(),
        is_ready=False,
        role=address.role,
        is_leaving=address.is_leaving,
    )
