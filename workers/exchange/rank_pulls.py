"""A pull of KV blocks by all ranks of a group: each copies its own heads, and the pull ends with the last.

Rank 0 gives its own agent the order and sends it to the ranks above, whose main thread hands it to their
agent between two steps, at once when the group is idle. Their reports come back over the same connection.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from threading import Lock
from typing import Protocol

import msgspec

from workers.engine.exchange import Pulled
from workers.runtime.frames import ProtocolError
from workers.transfer.layout import KVLayout
from workers.transfer.link import Endpoint
from workers.transfer.puller import Order, SourceGroup
from workers.transfer.transport import TransferFailed
from workers.types import BlockRead

_log = logging.getLogger(__name__)


class PullAgent(Protocol):
    """What `workers.transfer.agent.Agent` is to a pull."""

    def pull(self, source: SourceGroup, order: Order) -> None:
        """Raises TransferFailed or ValueError when the order is not taken: then it does not end either."""
        ...

    def transports(self, source: SourceGroup) -> tuple[str, ...]:
        """By which the blocks of its ranks come here now."""
        ...


class _PullOrder(msgspec.Struct, frozen=True, array_like=True):
    pull_id: int
    layout: KVLayout
    endpoints: tuple[Endpoint, ...]
    blocks: tuple[BlockRead, ...]


class _PullReport(msgspec.Struct, frozen=True, array_like=True):
    pull_id: int
    error: str | None
    transports: tuple[str, ...]


class _Open:
    """A pull under way."""

    __slots__ = ("error", "ranks", "since_s", "source", "transports")

    def __init__(self, source: SourceGroup, ranks: Iterable[int], now_s: float) -> None:
        self.source = source
        self.since_s = now_s  # alone with its source: pulls of one source come one after the other
        self.ranks = set(ranks)  # that have not ended it
        self.error: str | None = None  # the first
        self.transports: set[str] = set()


class RankPulls:
    """Rank 0's side. `on_end` is called once for each pull, in any thread."""

    def __init__(
        self,
        agent: PullAgent,
        *,
        num_ranks: int,
        send_order: Callable[[bytes], None],
        on_end: Callable[[Pulled], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """send_order: to all ranks above 0; raises GroupFailed when one is gone."""
        self._agent = agent
        self._num_ranks = num_ranks
        self._send_order = send_order
        self._on_end = on_end
        self._clock = clock
        self._lock = Lock()
        self._open: dict[int, _Open] = {}

    def start(self, pull_id: int, source: SourceGroup, blocks: tuple[BlockRead, ...]) -> None:
        """Has all ranks pull. Raises GroupFailed."""
        with self._lock:
            self._open[pull_id] = _Open(source, range(self._num_ranks), self._clock())
        if self._num_ranks > 1:
            order = _PullOrder(pull_id, source.layout, source.endpoints, blocks)
            self._send_order(msgspec.msgpack.encode(order))
        _begin(self._agent, source, pull_id, blocks, lambda *end: self._ended(0, pull_id, *end))

    def on_report(self, rank: int, body: bytes) -> None:
        """What a rank above 0 says. Raises ProtocolError."""
        try:
            report = msgspec.msgpack.decode(body, type=_PullReport)
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"a report of a pull: {error}") from error
        self._ended(rank, report.pull_id, report.error, report.transports)

    def _ended(self, rank: int, pull_id: int, error: str | None, transports: tuple[str, ...]) -> None:
        with self._lock:
            pull = self._open.get(pull_id)
            if pull is None or rank not in pull.ranks:
                _log.error("rank %d ends pull %d, which it does not have", rank, pull_id)
                return
            pull.ranks.discard(rank)
            pull.transports.update(transports)
            if error is not None and pull.error is None:
                pull.error = error if self._num_ranks == 1 else f"rank {rank}: {error}"
            if pull.ranks:
                return
            del self._open[pull_id]
            now_s = self._clock()
            seconds = now_s - pull.since_s
            for other in self._open.values():
                if other.source == pull.source:
                    other.since_s = now_s
        self._on_end(Pulled(pull_id, pull.error, "+".join(sorted(pull.transports)), seconds))


class FollowerPulls:
    """The side of a rank above 0. Whatever goes wrong with a pull is reported, and ends nothing else."""

    def __init__(self, agent: PullAgent, report: Callable[[bytes], None]) -> None:
        """report: to rank 0, from any thread."""
        self._agent = agent
        self._report = report

    def on_order(self, body: bytes) -> None:
        """Begins to pull. Raises ProtocolError for what is no order."""
        try:
            order = msgspec.msgpack.decode(body, type=_PullOrder)
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"an order to pull: {error}") from error
        source = SourceGroup(order.layout, order.endpoints)
        _begin(
            self._agent,
            source,
            order.pull_id,
            order.blocks,
            lambda *end: self._report(msgspec.msgpack.encode(_PullReport(order.pull_id, *end))),
        )


def _begin(
    agent: PullAgent,
    source: SourceGroup,
    pull_id: int,
    blocks: tuple[BlockRead, ...],
    on_end: Callable[[str | None, tuple[str, ...]], None],
) -> None:
    """on_end(error, transports) comes once, also for an order that the agent does not take."""

    def ended(_pull_id: int, error: TransferFailed | None) -> None:
        on_end(None if error is None else str(error), agent.transports(source))

    try:
        agent.pull(source, Order(pull_id, blocks, ended))
    except (TransferFailed, ValueError) as error:
        on_end(str(error), ())
