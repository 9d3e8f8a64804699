"""A pull of KV blocks by all ranks of a group: each copies its own heads, and the pull ends with the last.

Rank 0 gives its own agent the order and sends it to the ranks above, whose main thread hands it to their
agent between two steps, at once when the group is idle. Their reports come back over the same connection.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from threading import Lock
from typing import Protocol

import msgspec

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


class _PullOrder(msgspec.Struct, frozen=True, array_like=True):
    pull_id: int
    layout: KVLayout
    endpoints: tuple[Endpoint, ...]
    blocks: tuple[BlockRead, ...]


class _PullReport(msgspec.Struct, frozen=True, array_like=True):
    pull_id: int
    error: str | None


class _Open:
    """A pull under way."""

    __slots__ = ("error", "ranks")

    def __init__(self, ranks: Iterable[int]) -> None:
        self.ranks = set(ranks)  # that have not ended it
        self.error: str | None = None  # the first


class RankPulls:
    """Rank 0's side. `on_end(pull_id, error)` is called once for each pull, in any thread."""

    def __init__(
        self,
        agent: PullAgent,
        *,
        num_ranks: int,
        send_order: Callable[[bytes], None],
        on_end: Callable[[int, str | None], None],
    ) -> None:
        """send_order: to all ranks above 0; raises GroupFailed when one is gone."""
        self._agent = agent
        self._num_ranks = num_ranks
        self._send_order = send_order
        self._on_end = on_end
        self._lock = Lock()
        self._open: dict[int, _Open] = {}

    def start(self, pull_id: int, source: SourceGroup, blocks: tuple[BlockRead, ...]) -> None:
        """Has all ranks pull. Raises GroupFailed."""
        with self._lock:
            self._open[pull_id] = _Open(range(self._num_ranks))
        if self._num_ranks > 1:
            order = _PullOrder(pull_id, source.layout, source.endpoints, blocks)
            self._send_order(msgspec.msgpack.encode(order))
        _begin(self._agent, source, pull_id, blocks, lambda error: self._ended(0, pull_id, error))

    def on_report(self, rank: int, body: bytes) -> None:
        """What a rank above 0 says. Raises ProtocolError."""
        try:
            report = msgspec.msgpack.decode(body, type=_PullReport)
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"a report of a pull: {error}") from error
        self._ended(rank, report.pull_id, report.error)

    def _ended(self, rank: int, pull_id: int, error: str | None) -> None:
        with self._lock:
            pull = self._open.get(pull_id)
            if pull is None or rank not in pull.ranks:
                _log.error("rank %d ends pull %d, which it does not have", rank, pull_id)
                return
            pull.ranks.discard(rank)
            if error is not None and pull.error is None:
                pull.error = error if self._num_ranks == 1 else f"rank {rank}: {error}"
            if pull.ranks:
                return
            del self._open[pull_id]
        self._on_end(pull_id, pull.error)


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
            lambda error: self._report(msgspec.msgpack.encode(_PullReport(order.pull_id, error))),
        )


def _begin(
    agent: PullAgent,
    source: SourceGroup,
    pull_id: int,
    blocks: tuple[BlockRead, ...],
    on_end: Callable[[str | None], None],
) -> None:
    """on_end comes once, also for an order that the agent does not take."""

    def ended(_pull_id: int, error: TransferFailed | None) -> None:
        on_end(None if error is None else str(error))

    try:
        agent.pull(source, Order(pull_id, blocks, ended))
    except (TransferFailed, ValueError) as error:
        on_end(str(error))
