"""A pull by all ranks: one order to each, one end for all."""

from __future__ import annotations

import msgspec
import pytest

from tests.unit.transfer.layouts import layout
from workers.engine.exchange import Pulled
from workers.exchange.rank_pulls import FollowerPulls, RankPulls
from workers.runtime.frames import ProtocolError
from workers.transfer.link import Endpoint
from workers.transfer.puller import Order, SourceGroup
from workers.transfer.transport import Reason, TransferFailed
from workers.types import BlockRead

SOURCE = SourceGroup(
    layout(tensor_parallel=2, num_kv_heads=2), (Endpoint("10.0.0.1", 4000), Endpoint("10.0.0.1", 4001))
)
BLOCKS = (BlockRead(3, 2**48, 0), BlockRead(9, 2**48 + 7, 5))


class Agent:
    """Takes orders, or does not."""

    def __init__(self, refusal: Exception | None = None) -> None:
        self.refusal = refusal
        self.by: tuple[str, ...] = ()
        self.orders: list[tuple[SourceGroup, Order]] = []

    def pull(self, source: SourceGroup, order: Order) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.orders.append((source, order))

    def transports(self, source: SourceGroup) -> tuple[str, ...]:
        return self.by

    def end(self, error: TransferFailed | None = None) -> None:
        _, order = self.orders.pop(0)
        order.on_end(order.pull_id, error)


class Ranks:
    """Rank 0 and those above, without the connections between them."""

    def __init__(self, *agents: Agent) -> None:
        self.now_s = 0.0
        self.ends: list[Pulled] = []
        self.agents = agents
        self.pulls = RankPulls(
            agents[0],
            num_ranks=len(agents),
            send_order=self._send,
            on_end=self.ends.append,
            clock=lambda: self.now_s,
        )
        self._followers = [
            FollowerPulls(agent, lambda body, rank=rank: self.pulls.on_report(rank, body))
            for rank, agent in enumerate(agents[1:], 1)
        ]

    def _send(self, body: bytes) -> None:
        for follower in self._followers:
            follower.on_order(body)


def failed(message: str) -> TransferFailed:
    return TransferFailed(Reason.STALE, message)


def test_every_rank_gets_the_same_order_and_the_pull_ends_with_the_last() -> None:
    ranks = Ranks(Agent(), Agent(), Agent())
    ranks.pulls.start(5, SOURCE, BLOCKS)
    ranks.pulls.start(6, SOURCE, BLOCKS[:1])
    for agent in ranks.agents:
        assert [source for source, _ in agent.orders] == [SOURCE, SOURCE]
        assert [(order.pull_id, order.blocks) for _, order in agent.orders] == [(5, BLOCKS), (6, BLOCKS[:1])]
    for agent in (ranks.agents[2], ranks.agents[0]):
        agent.end()
    assert ranks.ends == []
    ranks.agents[1].end()
    assert ranks.ends == [Pulled(5, None)]
    for agent in ranks.agents:
        agent.end()
    assert ranks.ends == [Pulled(5, None), Pulled(6, None)]


def test_a_pull_has_its_source_to_itself_from_the_end_of_the_one_before() -> None:
    ranks = Ranks(Agent(), Agent())
    other = SOURCE._replace(endpoints=SOURCE.endpoints[::-1])
    ranks.agents[0].by, ranks.agents[1].by = ("memory",), ("memory", "sockets")
    for number, source in enumerate((SOURCE, SOURCE, other)):
        ranks.pulls.start(number, source, BLOCKS)
    for now_s in (1.0, 1.5, 4.0):
        ranks.now_s = now_s
        for agent in ranks.agents:
            agent.end()
    assert ranks.ends == [
        Pulled(0, None, "memory+sockets", 1.0),
        Pulled(1, None, "memory+sockets", 0.5),
        Pulled(2, None, "memory+sockets", 4.0),
    ]


def test_an_error_waits_for_the_other_ranks_and_the_first_is_told() -> None:
    ranks = Ranks(Agent(), Agent(), Agent())
    ranks.pulls.start(1, SOURCE, BLOCKS)
    ranks.agents[1].end(failed("gone"))
    ranks.agents[0].end()
    assert ranks.ends == []
    ranks.agents[2].end(failed("gone too"))
    assert ranks.ends == [Pulled(1, "rank 1: stale: gone")]


def test_a_rank_that_takes_no_order_says_so_and_lives() -> None:
    ranks = Ranks(Agent(), Agent(ValueError("blocks outside the own pool")), Agent(failed("it ends")))
    ranks.pulls.start(1, SOURCE, BLOCKS)
    assert ranks.ends == []
    ranks.agents[0].end()
    assert ranks.ends == [Pulled(1, "rank 1: blocks outside the own pool")]
    alone = Ranks(Agent(failed("too many orders")))
    alone.pulls.start(2, SOURCE, BLOCKS)
    assert alone.ends == [Pulled(2, "stale: too many orders")]


def test_a_report_that_belongs_to_nothing_changes_nothing() -> None:
    ranks = Ranks(Agent(), Agent())
    ranks.pulls.start(1, SOURCE, BLOCKS)
    report = msgspec.msgpack.encode([1, None, []])
    ranks.pulls.on_report(1, report)
    ranks.pulls.on_report(1, report)
    ranks.pulls.on_report(1, msgspec.msgpack.encode([7, "of no pull", []]))
    assert ranks.ends == []
    ranks.agents[0].end()
    assert ranks.ends == [Pulled(1, None)]
    ranks.pulls.on_report(1, report)
    assert ranks.ends == [Pulled(1, None)]


@pytest.mark.parametrize("body", [b"", b"\xc1", msgspec.msgpack.encode(["1", None, []]), b"\x93\x01"])
def test_what_is_no_order_or_report_is_a_protocol_error(body: bytes) -> None:
    ranks = Ranks(Agent(), Agent())
    with pytest.raises(ProtocolError, match="a report of a pull"):
        ranks.pulls.on_report(1, body)
    with pytest.raises(ProtocolError, match="an order to pull"):
        FollowerPulls(Agent(), lambda body: None).on_order(body)
