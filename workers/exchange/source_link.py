"""The connection to one group whose KV blocks are read here.

    connecting -> open, with a lease for each fetch -> over: lost, refused, or not needed any more

Leases that are asked for while the connection is made go out as soon as it stands. When it is over, every
fetch that still has a lease hears why. Belongs to the asyncio loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final

import msgspec

from workers.config import TransferConfig
from workers.data_plane.channel import Channel, ClientIdentity, HandshakeFailed, connect
from workers.data_plane.wire import (
    MAX_LEASE_BLOCKS,
    CloseLease,
    Goodbye,
    KVPool,
    LeaseOffer,
    LeaseRefused,
    Message,
    OpenLease,
    Ping,
    Pong,
    RenewLeases,
    WireError,
)
from workers.engine.exchange import ExchangeCommand, Offered, SourceLost
from workers.hashing import BlockHash
from workers.transfer.layout import IncompatibleLayouts, KVLayout, check_compatible
from workers.transfer.link import Endpoint
from workers.transfer.puller import SourceGroup, source_group
from workers.types import BlockOffer, KVSource

KEEP_S: Final = 30.0  # a connection without a lease

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Lease:
    fetch_id: int
    message: OpenLease


class SourceLink:
    """One connection, made at once."""

    def __init__(
        self,
        source: KVSource,
        identity: ClientIdentity,
        layout: KVLayout,
        transfer: TransferConfig,
        *,
        tell: Callable[[ExchangeCommand], None],
        know: Callable[[int, SourceGroup], None],
    ) -> None:
        """tell: the engine. know(fetch_id, group): where a fetch's blocks are, before they are offered."""
        self._source = source
        self._layout = layout
        self._transfer = transfer
        self._tell = tell
        self._know = know
        self._loop = asyncio.get_running_loop()
        self._numbers = count(1)
        self._leases: dict[int, _Lease] = {}  # by number
        self._group: SourceGroup | None = None
        self._channel: Channel | None = None
        self._used_s = self._loop.time()
        self.is_over = False
        self._connecting = self._loop.create_task(self._connect(identity))

    def open(self, fetch_id: int, hashes: Sequence[BlockHash], transfer_id: str | None) -> None:
        """Asks for a lease. Not once the connection is over."""
        assert not self.is_over
        number = next(self._numbers)
        message = OpenLease(number=number, hashes=tuple(hashes[:MAX_LEASE_BLOCKS]), transfer_id=transfer_id)
        self._leases[number] = _Lease(fetch_id, message)
        self._used_s = self._loop.time()
        if self._channel is not None:
            self._channel.send(message)

    def close(self, fetch_id: int) -> None:
        """The lease of this fetch is not needed any more; there may be none."""
        for number in [number for number, lease in self._leases.items() if lease.fetch_id == fetch_id]:
            del self._leases[number]
            self._used_s = self._loop.time()
            if self._channel is not None:
                self._channel.send(CloseLease(number=number))

    def check(self, *, may_judge: bool, renews: bool) -> None:
        """To be called by a timer: ends what is silent or idle, and renews the leases if it is time to.
        may_judge: this process has come to read what the source has sent."""
        now_s = self._loop.time()
        channel = self._channel
        if channel is None or self.is_over:
            return
        silent_s = now_s - channel.heard_s
        if may_judge and silent_s > self._transfer.silent_s:
            reason = f"silent for {silent_s:.1f} s"
            channel.drop(reason)
            self._lose(reason)
        elif self._leases:
            self._used_s = now_s
            if renews:
                channel.send(RenewLeases(numbers=tuple(self._leases)))
        elif now_s - self._used_s > KEEP_S:
            self.end("not needed any more")

    def end(self, reason: str) -> None:
        """Closes. May be called twice."""
        self._connecting.cancel()
        if self._channel is not None:
            self._channel.close(reason)
        self._lose(reason)

    async def _connect(self, identity: ClientIdentity) -> None:
        source = self._source
        try:
            channel, info = await connect(
                source.host,
                source.port,
                identity,
                on_message=self._message,
                on_closed=lambda _channel, reason: self._lose(reason),
                timeout_s=self._transfer.timeout_s,
            )
        except HandshakeFailed as error:
            self._lose(str(error))
            return
        except Exception as error:  # as of a host that is no name: whoever waits must hear of it
            _log.exception("connecting to %s at %s:%d", source.group_id, source.host, source.port)
            self._lose(f"no connection to {source.host}:{source.port}: {type(error).__name__}: {error}")
            return
        if info.group_id != source.group_id:
            self._refuse(channel, f"group {info.group_id} listens at {source.host}:{source.port}")
            return
        if not self.is_over:
            self._channel = channel
            channel.send(*[lease.message for lease in self._leases.values()])

    def _message(self, channel: Channel, message: Message) -> None:
        match message:
            case KVPool():
                self._take_pool(channel, message)
            case LeaseOffer():
                self._take_offer(message)
            case LeaseRefused():
                if (lease := self._leases.pop(message.number, None)) is not None:
                    self._tell(SourceLost(lease.fetch_id, message.reason))
            case Ping():
                channel.send(Pong())
            case Goodbye():
                self._refuse(channel, message.reason)
            case _:  # WELCOME, STATS
                pass

    def _take_pool(self, channel: Channel, pool: KVPool) -> None:
        """Raises WireError for what is no pool."""
        try:
            layout = msgspec.convert(pool.layout, KVLayout)
            group = source_group(layout, [Endpoint(*endpoint) for endpoint in pool.endpoints])
        except (msgspec.ValidationError, ValueError) as error:
            raise WireError(f"a description of a KV pool: {error}") from error
        try:
            check_compatible(self._layout, layout)
        except IncompatibleLayouts as error:
            self._refuse(channel, str(error))
            return
        self._group = group

    def _take_offer(self, offer: LeaseOffer) -> None:
        if self._group is None or len(offer.blocks) != len(offer.generations):
            raise WireError("an offer of blocks without a pool, or without their generations")
        lease = self._leases.get(offer.number)
        if lease is None:  # closed meanwhile
            return
        self._know(lease.fetch_id, self._group)
        offers = tuple(
            BlockOffer(index=index, block=block, generation=generation)
            for index, (block, generation) in enumerate(
                zip(offer.blocks, offer.generations, strict=True), offer.first
            )
        )
        self._tell(Offered(lease.fetch_id, offers, offer.is_complete))

    def _refuse(self, channel: Channel, reason: str) -> None:
        channel.close(reason)
        self._lose(reason)

    def _lose(self, reason: str) -> None:
        if self.is_over:
            return
        self.is_over = True
        self._channel = None
        leases, self._leases = list(self._leases.values()), {}
        if leases:
            _log.warning("no KV blocks from %s any more: %s", self._source.group_id, reason)
        for lease in leases:
            self._tell(SourceLost(lease.fetch_id, reason))
