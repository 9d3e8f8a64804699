"""One connection of this router to one epoch of a group: from its greeting to its end, never reconnected.

It keeps the group's part of the prefix index and its load, and passes tokens on. It is lost when the peer
closes, says nonsense, or is silent for too long (rank 0 sends a heartbeat every second).
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from router.routing.load import LoadTracker
from router.routing.prefix_index import PrefixIndex
from workers.data_plane.channel import Channel, ClientIdentity, HandshakeFailed, SilenceCheck, connect
from workers.data_plane.wire import (
    Abort,
    Chunks,
    Events,
    Goodbye,
    Message,
    Ping,
    Pong,
    Redirect,
    Resync,
    Snapshot,
    Stats,
    Welcome,
    WireError,
)
from workers.hashing import BlockHash
from workers.report import GroupReport
from workers.types import GroupAddress, GroupInfo, KVSource, RequestId, TokenChunk

_log = logging.getLogger(__name__)

_MAX_REMEMBERED_ABORTS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLimits:
    """Times of a connection to a group."""

    connect_timeout_s: float = 5.0  # connect and greet
    dead_after_s: float = 10.0  # a group silent for longer is gone
    check_period_s: float = 0.5


class TokenSink(Protocol):
    """Who gets what a link delivers."""

    def on_chunks(self, link: GroupLink, chunks: Sequence[TokenChunk]) -> None:
        """Tokens of one step."""
        ...

    def on_link_closed(self, link: GroupLink, reason: str) -> None:
        """Nothing more comes from this link. Called exactly once for a link that was opened."""
        ...


class GroupLink:
    """An open connection to a group. Create by `open_link`."""

    def __init__(
        self, address: GroupAddress, index: PrefixIndex, sink: TokenSink, limits: LinkLimits
    ) -> None:
        self.address = address
        self.is_ready = False  # a real token has come over this link
        self._index = index
        self._sink = sink
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._channel: Channel | None = None
        self._info: GroupInfo | None = None
        self._load: LoadTracker | None = None
        self._report = GroupReport()
        self._snapshot_parts: list[BlockHash] = []
        self._awaits_snapshot = True
        self._aborted: OrderedDict[RequestId, None] = OrderedDict()
        self._goodbye: str | None = None
        self.suspect: RequestId | None = None  # a request that is tried here, see `journey`
        self.was_stopped = False  # the group has said that it ends as planned
        self._timer: asyncio.TimerHandle | None = None
        self._silence = SilenceCheck(limits.check_period_s)
        self.closed: asyncio.Future[str] = self._loop.create_future()  # the reason

    @property
    def info(self) -> GroupInfo:
        """What the group said it is."""
        assert self._info is not None, "the link has not been opened"
        return self._info

    @property
    def load(self) -> LoadTracker:
        """Its load; the dispatcher adds what it sends."""
        assert self._load is not None, "the link has not been opened"
        return self._load

    @property
    def report(self) -> GroupReport:
        """What the group has told of itself last, beside its load."""
        return self._report

    @property
    def is_open(self) -> bool:
        """Whether tokens can still come."""
        return not self.closed.done() and self._channel is not None and self._channel.is_open

    @property
    def silent_s(self) -> float:
        """Seconds since anything came."""
        return self._loop.time() - self._channel.heard_s if self._channel is not None else 0.0

    def abort(self, request_id: RequestId) -> None:
        """Tells the group, once, that nobody wants this request."""
        if self._channel is None or not self._channel.is_open or request_id in self._aborted:
            return
        self._aborted[request_id] = None
        if len(self._aborted) > _MAX_REMEMBERED_ABORTS:
            self._aborted.popitem(last=False)
        self._channel.send(Abort(request_id=request_id))

    def redirect(self, request_id: RequestId, source: KVSource | None) -> None:
        """Tells the group to read the prompt's blocks from another source, or to compute them itself."""
        if self._channel is not None and self._channel.is_open:
            self._channel.send(Redirect(request_id=request_id, source=source))

    def close(self, reason: str) -> None:
        """Ends the link; the group aborts what it runs for it."""
        if self._channel is not None:
            self._channel.close(reason)

    def attach(self, channel: Channel) -> None:
        """The greeting is over."""
        self._channel = channel
        self._watch()

    def on_message(self, channel: Channel, message: Message) -> None:
        """Handles one frame; raises WireError to drop the connection."""
        match message:
            case Chunks():
                self._sink.on_chunks(self, message.chunks)
            case Stats():
                self.load.on_stats(message.stats)
                self._report = message.report or self._report
            case Events():
                if not self._index.apply(self.info.group_id, message.events):
                    self._resync(channel)
            case Snapshot():
                self._take_snapshot(message)
            case Ping():
                channel.send(Pong())
            case Welcome():
                self._welcome(message.info)
            case Goodbye():
                self._goodbye, self.was_stopped = message.reason, message.is_planned
            case _:
                raise WireError(f"a group does not send {type(message).__name__}")

    def on_closed(self, _channel: Channel, reason: str) -> None:
        """The connection has ended."""
        if self._timer is not None:
            self._timer.cancel()
        if self._info is not None:
            self._index.drop_group(self._info.group_id)
        if not self.closed.done():
            reason = self._goodbye or reason
            self.closed.set_result(reason)
            self._sink.on_link_closed(self, reason)

    def _welcome(self, info: GroupInfo) -> None:
        if self._info is not None:
            raise WireError("WELCOME after the greeting")
        expected, found = (self.address.group_id, self.address.epoch), (info.group_id, info.epoch)
        if expected != found:
            raise WireError(
                f"{self.address.host}:{self.address.port} is group {found[0]} epoch {found[1]},"
                f" the directory says {expected[0]} epoch {expected[1]}"
            )
        self._info = info
        self._load = LoadTracker(
            info.group_id,
            info.block_size,
            info.num_blocks,
            role=info.role,
            kv_format=_kv_format(info),
            block_bytes=info.kv_bytes_per_block,
            context_token_s=info.context_token_s,
        )
        self._index.add_group(info.group_id, info.num_blocks)

    def _take_snapshot(self, snapshot: Snapshot) -> None:
        self._snapshot_parts += snapshot.block_hashes
        if len(self._snapshot_parts) > self.info.num_blocks:
            raise WireError(f"a snapshot of more than the group's {self.info.num_blocks} blocks")
        if snapshot.is_last:
            self._index.load_snapshot(self.info.group_id, snapshot.number, self._snapshot_parts)
            self._snapshot_parts = []
            self._awaits_snapshot = False

    def _resync(self, channel: Channel) -> None:
        if not self._awaits_snapshot:
            _log.warning("block log of %s has a gap: asking for a snapshot", self.info.group_id)
            self._awaits_snapshot = True
            channel.send(Resync())

    def _watch(self) -> None:
        """Drops the connection of a group that is silent for too long."""
        if self._channel is None or self.closed.done():
            return
        may_judge = self._silence.may_judge(self._loop.time())
        if self.silent_s > self._limits.dead_after_s and may_judge:
            self._channel.drop(f"group {self.address.group_id} was silent for {self.silent_s:.1f} s")
        else:
            self._timer = self._loop.call_later(self._limits.check_period_s, self._watch)


def _kv_format(info: GroupInfo) -> str:
    """Equal for groups that can read each other's KV blocks; they compare the rest when they meet."""
    return f"{info.model_hash} {info.dtype} {info.kv_dtype} {info.block_size}" if info.exchanges_kv else ""


async def open_link(
    address: GroupAddress,
    identity: ClientIdentity,
    *,
    index: PrefixIndex,
    sink: TokenSink,
    limits: LinkLimits,
) -> GroupLink:
    """Connects to a group. Raises HandshakeFailed."""
    link = GroupLink(address, index, sink, limits)
    channel, _ = await connect(
        address.host,
        address.port,
        identity,
        on_message=link.on_message,
        on_closed=link.on_closed,
        timeout_s=limits.connect_timeout_s,
    )
    link.attach(channel)
    if not channel.is_open:
        await link.closed  # at hand: the loop delivers it with the end of the connection
        raise HandshakeFailed(f"{address.group_id} is not usable: {link.closed.result()}")
    return link
