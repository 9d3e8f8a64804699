"""The connection to a group whose blocks are read, against a server that says what the test wants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, replace

import pytest

from tests.unit.data_plane.fakes import FAST_SERVER, SECRET, FakeGroup, run, serving, until
from tests.unit.transfer.layouts import layout
from workers.config import TransferConfig
from workers.data_plane.channel import ClientIdentity
from workers.data_plane.lease_server import LeaseServer
from workers.data_plane.server import ServerLimits
from workers.data_plane.wire import KVPool
from workers.engine.exchange import CloseLease as EndLease
from workers.engine.exchange import ExchangeCommand, Offered, Pulled, SourceLost
from workers.engine.exchange import OpenLease as BeginLease
from workers.engine.leases import LeaseId
from workers.exchange import source_link
from workers.exchange.group_peers import GroupPeers
from workers.exchange.rank_pulls import RankPulls
from workers.hashing import BlockHash
from workers.transfer.layout import KVLayout
from workers.transfer.link import Endpoint
from workers.transfer.puller import Order, SourceGroup
from workers.types import BlockOffer, BlockRead, GroupId, KVSource

OWN = layout()
USUAL = TransferConfig()
HASHES = tuple(BlockHash(bytes([number]) * 16) for number in range(3))
OFFERS = (BlockOffer(index=0, block=4, generation=2**50), BlockOffer(index=1, block=9, generation=3))


def pool_of(what: KVLayout, port: int = 4000) -> KVPool:
    return KVPool(layout=asdict(what), endpoints=(("127.0.0.1", port),) * what.tensor_parallel)


class Lender:
    """The source's engine, as its leases see it."""

    def __init__(self) -> None:
        self.commands: list[ExchangeCommand] = []
        self.renewed: list[LeaseId] = []

    def exchange(self, command: ExchangeCommand) -> None:
        self.commands.append(command)

    def renew_lease(self, lease_id: LeaseId) -> None:
        self.renewed.append(lease_id)


class Agent:
    def __init__(self) -> None:
        self.orders: list[tuple[SourceGroup, Order]] = []

    def pull(self, source: SourceGroup, order: Order) -> None:
        self.orders.append((source, order))

    def transports(self, source: SourceGroup) -> tuple[str, ...]:
        return ("memory",)


class Bench:
    """A source and a reader of its blocks."""

    def __init__(self, group: FakeGroup, lease_server: LeaseServer, transfer: TransferConfig) -> None:
        self.group, self.lease_server, self.lender, self.agent = group, lease_server, Lender(), Agent()
        self.heard: list[ExchangeCommand] = []
        identity = ClientIdentity(client_id="reader", secret=SECRET, subscribes=False)
        self.peers = GroupPeers(identity=identity, layout=OWN, transfer=transfer)
        pulls = RankPulls(
            self.agent,
            num_ranks=1,
            send_order=lambda body: None,
            on_end=self.heard.append,
            clock=lambda: 0.0,
        )
        self.peers.start(pulls, self.heard.append)

    @property
    def source(self) -> KVSource:
        address = self.group.address
        return KVSource(group_id=address.group_id, host=address.host, port=address.port)

    async def leases(self, *fetches: int) -> list[LeaseId]:
        """Opened for these fetches."""
        known = len(self.lender.commands)
        for fetch_id in fetches:
            self.peers.open(fetch_id, self.source, HASHES)
        await until(lambda: len(self.lender.commands) == known + len(fetches))
        begun = self.lender.commands[known:]
        return [command.lease_id for command in begun if isinstance(command, BeginLease)]


@asynccontextmanager
async def bench(
    pool: KVPool | None = None,
    transfer: TransferConfig = USUAL,
    *,
    said_every_s: float = 2.0,
    limits: ServerLimits = FAST_SERVER,
) -> AsyncIterator[Bench]:
    """said_every_s: how often the source tells readers that wait that it lives."""
    lease_server = LeaseServer(heartbeat_s=said_every_s)
    async with serving(lease_server=lease_server, limits=limits) as group:
        made = Bench(group, lease_server, transfer)
        lease_server.open(pool or pool_of(OWN), made.lender)
        try:
            yield made
        finally:
            await made.peers.stop()


def test_from_a_lease_to_a_pull_and_its_end() -> None:
    async def test() -> None:
        async with bench() as made:
            (lease_id,) = await made.leases(1)
            made.lease_server.on_offer(lease_id, OFFERS, True)
            await until(lambda: made.heard == [Offered(1, OFFERS, True)])
            made.peers.pull(1, 8, [BlockRead(4, 2**50, 0)])
            ((source, order),) = made.agent.orders
            assert source == SourceGroup(OWN, (Endpoint("127.0.0.1", 4000),))
            order.on_end(8, None)
            assert made.heard[1:] == [Pulled(8, None, "memory", 0.0)]
            made.peers.close(1)
            await until(lambda: made.lender.commands[1:] == [EndLease(lease_id)])
            made.peers.pull(1, 9, [BlockRead(4, 2**50, 0)])  # nobody asks for it any more
            assert made.heard[2:] == [Pulled(9, "the source is not known any more")]
            assert await made.leases(2) == ["1:2"]  # the connection was kept

    run(test())


def test_once_stopped_no_connection_is_made() -> None:
    async def test() -> None:
        async with bench() as made:
            await made.peers.stop()
            made.peers.open(1, made.source, HASHES)
            await until(lambda: made.heard == [SourceLost(1, "this group ends")])
            assert made.lender.commands == []

    run(test())


def test_leases_are_renewed_and_an_idle_connection_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with bench(transfer=TransferConfig(heartbeat_s=0.05)) as made:
            one, two = await made.leases(1, 2)
            await until(lambda: made.lender.renewed.count(one) > 1 and made.lender.renewed.count(two) > 1)
            made.peers.close(1)
            made.peers.close(2)
            await until(lambda: made.group.server.client_ids == ["front-g1"])
            assert await made.leases(3) == ["2:1"] and made.heard == []

    monkeypatch.setattr(source_link, "KEEP_S", 0.2)
    run(test())


def test_a_source_that_goes_takes_all_its_fetches_along() -> None:
    async def test() -> None:
        async with bench() as made:
            await made.leases(1, 2)
            await made.group.server.stop("rank 1 died")
            await until(lambda: len(made.heard) == 2)
            assert made.heard == [SourceLost(1, "rank 1 died"), SourceLost(2, "rank 1 died")]
            made.peers.open(3, made.source, HASHES)
            await until(lambda: len(made.heard) == 3)
            assert isinstance(made.heard[2], SourceLost) and "cannot connect" in made.heard[2].reason

    run(test())


def test_a_source_that_does_not_greet_is_lost() -> None:
    async def test() -> None:
        held: list[asyncio.StreamWriter] = []

        async def accept(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            held.append(writer)  # and says nothing

        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        async with bench(transfer=TransferConfig(timeout_s=0.1)) as made, server:
            port = server.sockets[0].getsockname()[1]
            made.peers.open(1, replace(made.source, port=port), HASHES)
            await until(lambda: len(made.heard) == 1)
            assert made.heard == [SourceLost(1, f"no welcome from 127.0.0.1:{port} within 0.1 s")]
            held[0].close()

    run(test())


def test_a_source_that_falls_silent_is_lost_within_half_a_second_more() -> None:
    async def test() -> None:
        async with bench(
            transfer=TransferConfig(silent_s=0.3), limits=ServerLimits(heartbeat_s=60.0)
        ) as made:
            await made.leases(1)
            loop = asyncio.get_running_loop()
            heard_s = loop.time()
            await until(lambda: len(made.heard) == 1)
            assert 0.25 < loop.time() - heard_s < 1.5
            assert made.heard == [SourceLost(1, made.heard[0].reason)]  # type: ignore[union-attr]
            assert made.heard[0].reason.startswith("silent for 0.")  # type: ignore[union-attr]
            await until(lambda: made.lease_server.num_leases == 0)  # the source hears of that

    run(test())


def test_a_source_says_that_it_works_on_what_a_reader_waits_for() -> None:
    async def test() -> None:
        async with bench(said_every_s=0.05, limits=ServerLimits(heartbeat_s=0.05)) as made:
            one, _ = await made.leases(1, 2)  # and its engine says nothing
            await until(lambda: made.heard.count(Offered(1, (), False)) >= 2)
            assert set(made.heard) == {Offered(1, (), False), Offered(2, (), False)}
            made.lease_server.on_offer(one, OFFERS, True)
            await until(lambda: Offered(1, OFFERS, True) in made.heard)
            made.peers.close(2)
            await until(lambda: made.lease_server.num_leases == 1)
            num_heard = len(made.heard)
            await asyncio.sleep(0.2)
            assert len(made.heard) == num_heard

    run(test())


def test_blocks_that_do_not_fit_are_refused_with_both_values() -> None:
    async def test() -> None:
        async with bench(pool_of(replace(OWN, head_dim=8))) as made:
            made.peers.open(1, made.source, HASHES)
            await until(lambda: len(made.heard) == 1)
            (lost,) = made.heard
            assert isinstance(lost, SourceLost) and "head_dim (here 2, there 8)" in lost.reason

    run(test())


@pytest.mark.parametrize(
    "pool",
    [
        KVPool(layout={"model_hash": "m"}, endpoints=(("127.0.0.1", 4000),)),
        KVPool(layout={**asdict(OWN), "head_dim": 2**40}, endpoints=(("127.0.0.1", 4000),)),
        KVPool(layout={**asdict(OWN), "head_dim": "2"}, endpoints=(("127.0.0.1", 4000),)),
        replace(pool_of(OWN), endpoints=(("127.0.0.1", 4000),) * 2),
    ],
)
def test_a_description_that_makes_no_sense_ends_the_connection(pool: KVPool) -> None:
    async def test() -> None:
        async with bench(pool) as made:
            made.peers.open(1, made.source, HASHES)
            await until(lambda: len(made.heard) == 1)
            (lost,) = made.heard
            assert isinstance(lost, SourceLost) and "a description of a KV pool" in lost.reason

    run(test())


def test_an_address_that_is_none_is_answered_and_can_be_asked_again() -> None:
    async def test() -> None:
        async with bench() as made:
            for fetch_id in (1, 2):
                made.peers.open(fetch_id, replace(made.source, host="a" * 70 + ".example"), HASHES)
                await until(lambda number=fetch_id: len(made.heard) == number)
            assert all(isinstance(lost, SourceLost) for lost in made.heard)

    run(test())


def test_another_group_at_the_address_is_no_source() -> None:
    async def test() -> None:
        async with bench() as made:
            made.peers.open(1, replace(made.source, group_id=GroupId("g2")), HASHES)
            await until(lambda: len(made.heard) == 1)
            (lost,) = made.heard
            assert isinstance(lost, SourceLost) and lost.reason.startswith("group g1 listens at")
            assert made.lender.commands == []

    run(test())
