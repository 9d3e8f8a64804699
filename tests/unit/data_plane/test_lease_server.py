"""Leases of other groups, from their connection to the engine and back."""

from __future__ import annotations

import asyncio

import pytest

from tests.unit.data_plane.fakes import SECRET, FakeGroup, run, serving, until
from workers.data_plane import lease_server
from workers.data_plane.channel import Channel, ClientIdentity, connect
from workers.data_plane.lease_server import LeaseServer
from workers.data_plane.wire import (
    CloseLease,
    KVPool,
    LeaseOffer,
    LeaseRefused,
    Message,
    OpenLease,
    Ping,
    RenewLeases,
    Stats,
    Welcome,
)
from workers.engine.exchange import CloseLease as EndLease
from workers.engine.exchange import ExchangeCommand
from workers.engine.exchange import OpenLease as BeginLease
from workers.engine.leases import LeaseId
from workers.hashing import BlockHash
from workers.types import BlockOffer

POOL = KVPool(layout={"block_size": 16}, endpoints=(("127.0.0.1", 4000),))
HASHES = tuple(BlockHash(bytes([number]) * 16) for number in range(4))


class Engine:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.commands: list[ExchangeCommand] = []
        self.renewed: list[LeaseId] = []

    def exchange(self, command: ExchangeCommand) -> None:
        self.commands.append(command)

    def renew_lease(self, lease_id: LeaseId) -> None:
        self.renewed.append(lease_id)


class BlockReader:
    """A connection of another group."""

    def __init__(self, name: str = "other group") -> None:
        self.identity = ClientIdentity(client_id=name, secret=SECRET, subscribes=False)
        self.heard: list[Message] = []
        self.reason: str | None = None
        self.channel: Channel

    async def connect(self, group: FakeGroup) -> BlockReader:
        self.channel, _ = await connect(
            group.address.host,
            group.address.port,
            self.identity,
            on_message=self._message,
            on_closed=self._closed,
        )
        return self

    async def answers(self, count: int) -> list[Message]:
        await until(lambda: len(self.heard) >= count)
        return self.heard

    def _message(self, _channel: Channel, message: Message) -> None:
        if not isinstance(message, Welcome | Stats | Ping):
            self.heard.append(message)

    def _closed(self, _channel: Channel, reason: str) -> None:
        self.reason = reason


def open_lease(number: int, transfer_id: str | None = None) -> OpenLease:
    return OpenLease(number=number, hashes=HASHES, transfer_id=transfer_id)


def offers(first: int, *blocks: int) -> tuple[BlockOffer, ...]:
    return tuple(BlockOffer(index=first + i, block=b, generation=b + 100) for i, b in enumerate(blocks))


def test_a_lease_from_its_opening_to_its_end() -> None:
    async def test() -> None:
        leases, engine = LeaseServer(), Engine()
        async with serving(lease_server=leases) as group:
            leases.open(POOL, engine)
            reader = await BlockReader().connect(group)
            reader.channel.send(open_lease(1, "0f" * 16))
            assert await reader.answers(1) == [POOL]
            lease_id = LeaseId("1:1")
            assert engine.commands == [BeginLease(lease_id, HASHES, "0f" * 16)]
            await asyncio.to_thread(leases.on_offer, lease_id, offers(0, 7, 5), False)
            await asyncio.to_thread(leases.on_offer, lease_id, offers(2, 6), False)
            await asyncio.to_thread(leases.on_offer, lease_id, (), True)
            assert (await reader.answers(4))[1:] == [
                LeaseOffer(number=1, first=0, blocks=(7, 5), generations=(107, 105), is_complete=False),
                LeaseOffer(number=1, first=2, blocks=(6,), generations=(106,), is_complete=False),
                LeaseOffer(number=1, first=0, blocks=(), generations=(), is_complete=True),
            ]
            reader.channel.send(RenewLeases(numbers=(1, 5)), CloseLease(number=1), CloseLease(number=1))
            await until(lambda: len(engine.commands) == 2)
            assert engine.renewed == [lease_id]
            assert engine.commands[1] == EndLease(lease_id)
            leases.on_offer(lease_id, offers(3, 1), True)  # crossed with the end
            await asyncio.sleep(0.01)
            assert len(reader.heard) == 4 and leases.num_leases == 0

    run(test())


def test_the_end_of_a_connection_ends_its_leases_and_no_others() -> None:
    async def test() -> None:
        leases, engine = LeaseServer(), Engine()
        async with serving(lease_server=leases) as group:
            leases.open(POOL, engine)
            one, two = await BlockReader("one").connect(group), await BlockReader("two").connect(group)
            one.channel.send(open_lease(1), open_lease(2))
            await one.answers(1)
            two.channel.send(open_lease(1), CloseLease(number=2), RenewLeases(numbers=(2,)))  # not its own
            await two.answers(1)
            assert len(engine.commands) == 3
            one.channel.drop("the group was killed")
            await until(lambda: len(engine.commands) == 5)
            assert engine.commands[3:] == [EndLease(LeaseId("1:1")), EndLease(LeaseId("1:2"))]
            assert engine.renewed == [] and leases.num_leases == 1 and two.reason is None

    run(test())


def test_what_a_reader_asks_for_is_bounded_before_the_engine_hears_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lease_server, "MAX_READER_LEASES", 2)
    monkeypatch.setattr(lease_server, "MAX_HASHES_PER_S", 12)

    async def test() -> None:
        leases, engine = LeaseServer(), Engine()
        async with serving(lease_server=leases) as group:
            leases.open(POOL, engine)
            reader = await BlockReader().connect(group)
            reader.channel.send(open_lease(1), open_lease(2), open_lease(3))
            await reader.answers(2)
            reader.channel.send(CloseLease(number=1), open_lease(4), CloseLease(number=4), open_lease(5))
            await reader.answers(3)
            assert reader.heard[1:] == [
                LeaseRefused(number=3, reason="2 leases are open on this connection already"),
                LeaseRefused(number=5, reason="more than 12 blocks were asked for within a second"),
            ]
            opened = [command.lease_id for command in engine.commands if isinstance(command, BeginLease)]
            assert opened == ["1:1", "1:2", "1:4"]
            reader.channel.send(open_lease(4))
            await until(lambda: reader.reason is not None)

    run(test())


def test_a_group_that_lends_nothing_says_so() -> None:
    async def test() -> None:
        async with serving() as group:
            reader = await BlockReader().connect(group)
            reader.channel.send(RenewLeases(numbers=(1,)), CloseLease(number=1), open_lease(1))
            assert await reader.answers(1) == [LeaseRefused(number=1, reason="this group lends no blocks")]

    run(test())
