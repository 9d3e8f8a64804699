"""Other groups, from which this one reads KV blocks: what `workers.engine.fetch.KVPeers` asks for.

Leases are asked for, renewed and closed by the asyncio loop, one connection a source group, whatever step the
engine is in. Pulls are ordered by the engine's thread itself.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from workers.config import TransferConfig
from workers.data_plane.channel import ClientIdentity, SilenceCheck
from workers.engine.exchange import ExchangeCommand, Pulled, SourceLost
from workers.exchange.rank_pulls import RankPulls
from workers.exchange.source_link import SourceLink
from workers.hashing import BlockHash
from workers.tasks import start_task
from workers.transfer.layout import KVLayout
from workers.transfer.puller import SourceGroup
from workers.types import BlockRead, GroupId, KVSource

CHECK_S: Final = 0.5  # the longest between two looks at all connections


class _Place(NamedTuple):
    """What a connection is to."""

    group_id: GroupId
    host: str
    port: int


class GroupPeers:
    """`open`, `pull` and `close` are the engine's; `start` and `stop` belong to the asyncio loop."""

    def __init__(self, *, identity: ClientIdentity, layout: KVLayout, transfer: TransferConfig) -> None:
        """identity: of this group among the clients of another."""
        self._identity = identity
        self._layout = layout
        self._transfer = transfer
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pulls: RankPulls | None = None
        self._tell: Callable[[ExchangeCommand], None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._links: dict[_Place, SourceLink] = {}
        self._places: dict[int, _Place] = {}  # by fetch
        self._groups: dict[int, SourceGroup] = {}  # by fetch; the engine's thread looks up

    def start(self, pulls: RankPulls, tell: Callable[[ExchangeCommand], None]) -> None:
        """Before the engine's thread runs. tell: has the engine take a command."""
        self._loop = asyncio.get_running_loop()
        self._pulls = pulls
        self._tell = tell
        self._watching = start_task(self._watch(), "the renewal of leases in other groups")

    async def stop(self) -> None:
        """Closes all connections and makes no more. May be called twice."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
            self._watching = None
        for link in self._links.values():
            link.end("this group ends")
        self._links.clear()

    # -- of the engine's thread ---------------------------------------------------------------------------

    def open(self, fetch_id: int, source: KVSource, hashes: Sequence[BlockHash]) -> None:
        """Asks the source for a lease."""
        self._soon(self._open, fetch_id, source, tuple(hashes))

    def pull(self, fetch_id: int, pull_id: int, blocks: Sequence[BlockRead]) -> None:
        """Has all ranks copy. Raises GroupFailed when one of this group is gone."""
        assert self._pulls is not None and self._tell is not None, "start() first"
        group = self._groups.get(fetch_id)
        if group is None:
            self._tell(Pulled(pull_id, "the source is not known any more"))
            return
        self._pulls.start(pull_id, group, tuple(blocks))

    def close(self, fetch_id: int) -> None:
        """The lease is not needed any more."""
        self._soon(self._close, fetch_id)

    # -- of the asyncio loop ------------------------------------------------------------------------------

    def _soon(self, call: Callable[..., None], *arguments: object) -> None:
        assert self._loop is not None, "start() first"
        with contextlib.suppress(RuntimeError):  # the loop is closed: the group ends, and its engine with it
            self._loop.call_soon_threadsafe(call, *arguments)

    def _open(self, fetch_id: int, source: KVSource, hashes: tuple[BlockHash, ...]) -> None:
        assert self._tell is not None
        if self._watching is None:  # the engine's last steps
            self._tell(SourceLost(fetch_id, "this group ends"))
            return
        place = _Place(source.group_id, source.host, source.port)
        link = self._links.get(place)
        if link is None or link.is_over:
            link = self._links[place] = SourceLink(
                source,
                self._identity,
                self._layout,
                self._transfer,
                tell=self._tell,
                know=self._groups.__setitem__,
            )
        self._places[fetch_id] = place
        link.open(fetch_id, hashes, source.transfer_id)

    def _close(self, fetch_id: int) -> None:
        self._groups.pop(fetch_id, None)
        place = self._places.pop(fetch_id, None)
        if place is not None and (link := self._links.get(place)) is not None:
            link.close(fetch_id)

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        heartbeat_s = self._transfer.heartbeat_s
        period_s = min(CHECK_S, heartbeat_s)
        silence = SilenceCheck(period_s)
        renewed_s = loop.time()
        while True:
            await asyncio.sleep(period_s)
            now_s = loop.time()
            may_judge = silence.may_judge(now_s)
            renews = now_s - renewed_s >= heartbeat_s
            if renews:
                renewed_s = now_s
            for place, link in list(self._links.items()):
                link.check(may_judge=may_judge, renews=renews)
                if link.is_over:
                    del self._links[place]
