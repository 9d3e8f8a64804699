"""Leases that other groups have on this group's blocks, as their connections see them.

    OPEN_LEASE    -> the engine pins and offers: KV_POOL (once a connection), then LEASE_OFFER, several times;
                     empty ones, by a timer, as long as the engine has not said the last word
    RENEW_LEASES  -> the leases live on
    CLOSE_LEASE, or the end of the connection -> the engine unpins

A reader numbers its leases itself; the engine knows them by names that are made here, so that none can touch
another one's. What a reader may have and ask for is bounded before the engine hears of it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import Final, Protocol

from workers.data_plane.channel import Channel
from workers.data_plane.wire import (
    CloseLease,
    KVPool,
    LeaseOffer,
    LeaseRefused,
    OpenLease,
    RenewLeases,
    WireError,
)
from workers.engine import exchange
from workers.engine.leases import LeaseId
from workers.types import BlockOffer

MAX_READER_LEASES: Final = 512  # of one connection at the same time
MAX_HASHES_PER_S: Final = 200_000  # of one connection: three million tokens of prompts

LeaseMessage = OpenLease | RenewLeases | CloseLease


class LeaseInput(Protocol):
    """The engine, as leases need it. Both calls are thread-safe and return at once."""

    def exchange(self, command: exchange.ExchangeCommand) -> None:
        """See `workers.engine.loop`."""
        ...

    def renew_lease(self, lease_id: LeaseId) -> None:
        """See `workers.engine.loop`."""
        ...


@dataclass(slots=True)
class _Reader:
    """One connection that has asked for leases."""

    serial: int
    window_s: float  # since when hashes are counted
    num_hashes: int = 0
    leases: dict[int, LeaseId] = field(default_factory=dict)
    last_number: int = -1


class LeaseServer:
    """All readers of a group. All methods but `on_offer` belong to the asyncio loop."""

    def __init__(self, *, heartbeat_s: float = 2.0) -> None:
        """heartbeat_s: how often readers that wait hear that the group works on it."""
        self._heartbeat_s = heartbeat_s
        self._beat_s = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pool: KVPool | None = None
        self._engine: LeaseInput | None = None
        self._serials = count(1)
        self._readers: dict[Channel, _Reader] = {}
        self._holders: dict[LeaseId, tuple[Channel, int]] = {}
        self._growing: set[LeaseId] = set()  # of which the engine has not said the last word
        self._offers: deque[tuple[LeaseId, tuple[BlockOffer, ...], bool]] = deque()
        self._is_woken = False

    def open(self, pool: KVPool, engine: LeaseInput) -> None:
        """From now on blocks are lent. Until then, and without it, every lease is refused."""
        self._loop = asyncio.get_running_loop()
        self._beat_s = self._loop.time()
        self._pool = pool
        self._engine = engine

    @property
    def num_leases(self) -> int:
        """Leases that readers have not closed."""
        return len(self._holders)

    def handle(self, channel: Channel, message: LeaseMessage) -> None:
        """Takes what a greeted reader says. Raises WireError for what no reader says."""
        engine, pool = self._engine, self._pool
        if engine is None or pool is None:
            if isinstance(message, OpenLease):
                channel.send(LeaseRefused(number=message.number, reason="this group lends no blocks"))
            return
        match message:
            case OpenLease():
                self._open(engine, pool, channel, message)
            case RenewLeases():
                for lease_id in self._leases_of(channel, message.numbers):
                    engine.renew_lease(lease_id)
            case CloseLease():
                for lease_id in self._leases_of(channel, (message.number,)):
                    del self._readers[channel].leases[message.number]
                    self._end(engine, lease_id)

    def leave(self, channel: Channel) -> None:
        """The connection is gone: so are its leases."""
        reader = self._readers.pop(channel, None)
        if reader is not None:
            assert self._engine is not None
            for lease_id in reader.leases.values():
                self._end(self._engine, lease_id)

    def beat(self) -> None:
        """To be called by a timer: tells readers that wait that they do not wait for nothing. The engine may
        be in a long step, or have a long queue; an engine that has failed ends their connections."""
        now_s = asyncio.get_running_loop().time()
        if now_s - self._beat_s < self._heartbeat_s:
            return
        self._beat_s = now_s
        for lease_id in self._growing:
            channel, number = self._holders[lease_id]
            channel.send(_offer(number, (), is_complete=False))

    def on_offer(self, lease_id: LeaseId, offers: tuple[BlockOffer, ...], is_complete: bool) -> None:
        """The engine, in its thread: these blocks of the lease can be read, and no others if is_complete."""
        assert self._loop is not None, "no lease has been asked for"
        self._offers.append((lease_id, offers, is_complete))
        if not self._is_woken:
            self._is_woken = True
            try:
                self._loop.call_soon_threadsafe(self._pass_on)
            except RuntimeError:  # the loop is closed: no reader is left
                self._offers.clear()

    def _open(self, engine: LeaseInput, pool: KVPool, channel: Channel, message: OpenLease) -> None:
        now_s = asyncio.get_running_loop().time()
        reader = self._readers.get(channel)
        if reader is None:
            reader = self._readers[channel] = _Reader(next(self._serials), now_s)
            channel.send(pool)
        if message.number <= reader.last_number:
            raise WireError(f"lease {message.number} after {reader.last_number}: numbers must rise")
        reader.last_number = message.number
        if (refusal := self._refusal(reader, len(message.hashes), now_s)) is not None:
            channel.send(LeaseRefused(number=message.number, reason=refusal))
            return
        lease_id = LeaseId(f"{reader.serial}:{message.number}")
        reader.leases[message.number] = lease_id
        self._holders[lease_id] = (channel, message.number)
        self._growing.add(lease_id)
        engine.exchange(exchange.OpenLease(lease_id, message.hashes, message.transfer_id))

    def _leases_of(self, channel: Channel, numbers: Iterable[int]) -> list[LeaseId]:
        """Those that are open."""
        reader = self._readers.get(channel)
        if reader is None:
            return []
        return [reader.leases[number] for number in numbers if number in reader.leases]

    def _refusal(self, reader: _Reader, num_hashes: int, now_s: float) -> str | None:
        if now_s - reader.window_s >= 1.0:
            reader.window_s, reader.num_hashes = now_s, 0
        if len(reader.leases) >= MAX_READER_LEASES:
            return f"{MAX_READER_LEASES} leases are open on this connection already"
        if reader.num_hashes + num_hashes > MAX_HASHES_PER_S:
            return f"more than {MAX_HASHES_PER_S} blocks were asked for within a second"
        reader.num_hashes += num_hashes
        return None

    def _end(self, engine: LeaseInput, lease_id: LeaseId) -> None:
        del self._holders[lease_id]
        self._growing.discard(lease_id)
        engine.exchange(exchange.CloseLease(lease_id))

    def _pass_on(self) -> None:
        self._is_woken = False  # before taking, so that an offer that comes now wakes us again
        while self._offers:
            lease_id, offers, is_complete = self._offers.popleft()
            holder = self._holders.get(lease_id)
            if holder is None:  # closed meanwhile
                continue
            channel, number = holder
            if is_complete:
                self._growing.discard(lease_id)
            channel.send(_offer(number, offers, is_complete=is_complete))


def _offer(number: int, offers: tuple[BlockOffer, ...], *, is_complete: bool) -> LeaseOffer:
    return LeaseOffer(
        number=number,
        first=offers[0].index if offers else 0,
        blocks=tuple(offer.block for offer in offers),
        generations=tuple(offer.generation for offer in offers),
        is_complete=is_complete,
    )
