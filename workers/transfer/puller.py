"""Executes the pull orders for one source group, one after the other, in a thread of its own.

A source that hangs delays nobody else's orders. Connections are made by the first order and kept; a failure
drops them all, and the next order makes new ones. A process group that has failed is not tried with this
source again while there is another transport: whether it works between two ranks shows only in use.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from threading import Condition, Thread, current_thread
from typing import Final, NamedTuple

from workers.transfer.choice import Choice, choose
from workers.transfer.layout import IncompatibleLayouts, KVLayout, check_compatible, reads
from workers.transfer.link import Endpoint, PeerLink
from workers.transfer.pool_bytes import PoolBytes
from workers.transfer.process_group import PROCESS_GROUP
from workers.transfer.transport import Reader, Reason, TransferFailed
from workers.types import BlockRead

_END_TIMEOUT_S: Final = 15.0
_OF_TRANSPORT: Final = (Reason.UNREACHABLE, Reason.TIMEOUT, Reason.PROTOCOL, Reason.FAULT)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferSettings:
    """Of one rank."""

    secret: bytes  # of the application
    machine: str  # equal for processes that may share memory: `runtime.agreement.machine_id`
    transports: tuple[str, ...]  # in order of preference
    timeout_s: float = 5.0  # to connect and greet; for each answer; for each next run of bytes
    max_orders: int = 256  # that wait for one source


class SourceGroup(NamedTuple):
    """A group whose blocks can be read: its layout, and the agents of its ranks in their order."""

    layout: KVLayout
    endpoints: tuple[Endpoint, ...]


class Route(NamedTuple):
    """How the blocks of one rank of a source come here."""

    endpoint: Endpoint
    transport: str
    reason: str


class Order(NamedTuple):
    """Blocks to fetch. `on_end(pull_id, error)` is called once, when nothing will be written any more."""

    pull_id: int
    blocks: tuple[BlockRead, ...]
    on_end: Callable[[int, TransferFailed | None], None]


class Puller:
    """The thread for one source. Every order given to `add` ends by its callback, from this thread."""

    def __init__(
        self, source: SourceGroup, own: KVLayout, rank: int, pool: PoolBytes, settings: TransferSettings
    ) -> None:
        """Raises TransferFailed (REFUSED) when the source's blocks do not fit the own ones."""
        try:
            check_compatible(own, source.layout)
        except IncompatibleLayouts as error:
            raise TransferFailed(Reason.REFUSED, str(error)) from error
        self._source = source
        self._name = str(source.endpoints[0])
        pieces = reads(own, rank, source.layout)
        self._pieces = {of: list(part) for of, part in groupby(pieces, lambda piece: piece.peer_rank)}
        self._pool = pool
        self._settings = settings
        self._changed = Condition()  # guards all below
        self._orders: deque[Order] = deque()
        self._is_busy = False  # with an order
        self._choices: dict[int, Choice] = {}
        self._transports = settings.transports  # that are still tried
        self._is_closing = False
        self._thread = Thread(target=self._run, name="tandem-kv-puller", daemon=True)
        self._thread.start()

    @property
    def is_idle(self) -> bool:
        """No order waits or runs."""
        with self._changed:
            return not self._is_busy and not self._orders

    def routes(self) -> list[Route]:
        """The connections now."""
        with self._changed:
            return [
                Route(self._source.endpoints[rank], choice.reader.name, choice.reason)
                for rank, choice in sorted(self._choices.items())
            ]

    def add(self, order: Order) -> None:
        """Raises TransferFailed when too many orders wait, or after `close`."""
        with self._changed:
            if self._is_closing:
                raise TransferFailed(Reason.CANCELLED, "this rank ends")
            if len(self._orders) >= self._settings.max_orders:
                raise TransferFailed(
                    Reason.REFUSED, f"{len(self._orders)} orders wait for {self._name} already"
                )
            self._orders.append(order)
            self._changed.notify()

    def cancel(self) -> None:
        """Ends all orders soon, by their callbacks, and takes no more. Returns at once."""
        with self._changed:
            self._is_closing = True
            for choice in self._choices.values():
                choice.reader.cancel()
            self._changed.notify()

    def close(self) -> None:
        """As `cancel`; when it returns nothing is written into the pool any more. May be called twice."""
        self.cancel()
        if self._thread is current_thread():
            raise RuntimeError("close() from a callback of the thread that it ends")
        self._thread.join(_END_TIMEOUT_S)
        if self._thread.is_alive():
            raise RuntimeError(f"a KV puller of {self._name} did not end in {_END_TIMEOUT_S:g} s")

    def _run(self) -> None:
        while (order := self._next()) is not None:
            error = self._outcome(order)
            with self._changed:
                self._is_busy = False
            if error is not None:
                self._disconnect()
            try:
                order.on_end(order.pull_id, error)
            except Exception:  # the orders behind it must end too
                _log.exception("at the end of pull %d of %s", order.pull_id, self._name)
        self._disconnect()

    @contextmanager
    def _watching_transports(self) -> Iterator[None]:
        """Around what is done by one, once the owner has been reached."""
        try:
            yield
        except TransferFailed as error:
            self._do_without_group(error)
            raise

    def _do_without_group(self, error: TransferFailed) -> None:
        if error.reason not in _OF_TRANSPORT:
            return
        others = tuple(name for name in self._transports if name != PROCESS_GROUP)
        # Between host pools it is used only where nothing else may be.
        if others and others != self._transports and not self._pool.is_host_memory:
            self._transports = others
            _log.warning("blocks of %s are no longer read by a process group: %s", self._name, error)

    def _outcome(self, order: Order) -> TransferFailed | None:
        try:
            self._execute(order)
        except TransferFailed as error:
            return error
        except Exception as error:  # a thread that ended would strand all its orders
            _log.exception("pull %d of %s", order.pull_id, self._name)
            return TransferFailed(Reason.FAULT, f"{type(error).__name__}: {error}")
        return None

    def _next(self) -> Order | None:
        """Waits for an order; None at the end, when none is left."""
        with self._changed:
            while not self._orders:
                if self._is_closing:
                    return None
                self._changed.wait(timeout=1.0)
            self._is_busy = True
            return self._orders.popleft()

    def _execute(self, order: Order) -> None:
        # Bytes of ranks that keep no generations: rank 0 compares them, around all reads.
        is_checked_apart = any(rank != 0 for rank in self._pieces)
        needed = {0, *self._pieces} if is_checked_apart else set(self._pieces)
        readers = {rank: self._reader(rank) for rank in sorted(needed)}
        with self._watching_transports():
            if is_checked_apart:
                readers[0].check(order.blocks)
            for rank, pieces in self._pieces.items():
                readers[rank].read(order.blocks, pieces)
            if is_checked_apart:
                readers[0].check(order.blocks)

    def _reader(self, rank: int) -> Reader:
        """The kept one, or a new one. Raises TransferFailed."""
        choice = self._choices.get(rank)
        if choice is None and not self._is_closing:
            choice = self._connect(rank)
        with self._changed:
            if choice is not None:
                self._choices[rank] = choice
            if choice is None or self._is_closing:
                raise TransferFailed(Reason.CANCELLED, "the transfer was cancelled")
        return choice.reader

    def _connect(self, rank: int) -> Choice:
        settings, endpoint = self._settings, self._source.endpoints[rank]
        link = PeerLink(endpoint, settings.secret, timeout_s=settings.timeout_s)
        try:
            self._check_identity(rank, link)
            with self._watching_transports():
                return choose(
                    link, self._pool, settings.machine, self._transports, timeout_s=settings.timeout_s
                )
        except BaseException:
            link.close()
            raise

    def _check_identity(self, rank: int, link: PeerLink) -> None:
        facts, expected = link.facts, self._source.layout
        if facts.rank != rank or facts.layout != expected:
            raise TransferFailed(
                Reason.REFUSED,
                f"{link.endpoint} is rank {facts.rank} of a group with {facts.layout}, expected is rank "
                f"{rank} of {expected}",
            )

    def _disconnect(self) -> None:
        with self._changed:
            choices, self._choices = list(self._choices.values()), {}
        for choice in choices:
            choice.reader.close()


def source_group(layout: KVLayout, endpoints: Sequence[Endpoint]) -> SourceGroup:
    """Raises ValueError unless there is one endpoint a rank."""
    if len(endpoints) != layout.tensor_parallel:
        raise ValueError(f"{len(endpoints)} endpoints for a group of {layout.tensor_parallel} ranks")
    return SourceGroup(layout, tuple(endpoints))
