"""What a group's engine has to do with other groups: blocks it reads from them, and they from it.

The commands are how the rest of the process speaks to the engine's thread about it; see
`workers.engine.fetch_table` for the reading side and `workers.engine.leases` for the side that is read from.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from workers.config import TransferConfig
from workers.engine.block_pool import BlockPool
from workers.engine.fetch import KVPeers
from workers.engine.fetch_table import FetchTable
from workers.engine.leases import LeaseId, LeaseTable, LeaseTerms, OfferListener
from workers.engine.prefixes import PrefixesInProgress
from workers.engine.request import check_source
from workers.engine.sequence import Sequence
from workers.hashing import BlockHash
from workers.types import BlockOffer, KVSource, RequestId, RequestRefused

_log = logging.getLogger(__name__)

_SWEEP_PERIOD_S = 0.25
_PATIENCE_S = 2.0  # that a group with nothing else to do waits for memory held for other groups


@dataclass(frozen=True, slots=True)
class Offered:
    """The source of a fetch has these further blocks; is_complete: and no others. Without any it says that it
    still works on them."""

    fetch_id: int
    offers: tuple[BlockOffer, ...]
    is_complete: bool


@dataclass(frozen=True, slots=True)
class SourceLost:
    """The source of a fetch cannot be reached, has refused, or is gone."""

    fetch_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class Pulled:
    """A pull has ended on all ranks: nothing will be written into its blocks any more. error: they are not
    to be used. Exactly one for each pull."""

    pull_id: int
    error: str | None = None
    transport: str = ""  # by which the blocks came
    seconds: float = 0.0  # that it had its source to itself


@dataclass(frozen=True, slots=True)
class Redirect:
    """A request that waits for blocks is to read them elsewhere; None: to compute them. Without effect once
    it has been admitted."""

    request_id: RequestId
    source: KVSource | None


@dataclass(frozen=True, slots=True)
class OpenLease:
    """Another group wants to read these blocks, in the order of the chain."""

    lease_id: LeaseId
    hashes: tuple[BlockHash, ...]
    transfer_id: str | None


@dataclass(frozen=True, slots=True)
class CloseLease:
    """A reader has read, or its connection is gone."""

    lease_id: LeaseId


ExchangeCommand = Offered | SourceLost | Pulled | Redirect | OpenLease | CloseLease


def _nobody_reads(_lease_id: LeaseId, _offers: tuple[BlockOffer, ...], _is_complete: bool) -> None:
    """Where no listener is, no lease can have been asked for from outside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeSetup:
    """How a group exchanges blocks with others; as it stands, not at all."""

    peers: KVPeers | None = None  # through whom blocks are read; None: sources of requests are ignored
    on_offer: OfferListener = _nobody_reads  # hears, in the engine's thread, of blocks that others may read
    transfer: TransferConfig = field(default_factory=TransferConfig)  # times of both
    # Of the engine's blocks: drawn at random, it tells them from those of an earlier engine.
    first_generation: int = 0


class KVExchange:
    """Fetches and leases of a group, and the memory they hold. Used by the engine's thread."""

    def __init__(
        self,
        *,
        pool: BlockPool,
        block_size: int,
        in_progress: PrefixesInProgress,
        clock: Callable[[], float],
        setup: ExchangeSetup,
    ) -> None:
        transfer = setup.transfer
        self._clock = clock
        self.fetches = FetchTable(
            pool=pool,
            block_size=block_size,
            in_progress=in_progress,
            peers=setup.peers,
            clock=clock,
            stall_s=transfer.stall_s,
        )
        self.leases = LeaseTable(
            pool=pool,
            on_offer=setup.on_offer,
            clock=clock,
            terms=LeaseTerms(expire_s=transfer.lease_s, expect_s=transfer.expect_s),
        )
        self._swept_s = float("-inf")
        self._short_since_s: float | None = None

    @property
    def has_timers(self) -> bool:
        """Whether sweep() is to be called from time to time."""
        return self.fetches.is_busy or len(self.leases) > 0

    @property
    def is_holding(self) -> bool:
        """Whether blocks are held that come free without a step: then "no room" means "not yet"."""
        return self.fetches.is_busy or self.leases.is_pinning

    def handle(self, command: Offered | SourceLost | Pulled | OpenLease | CloseLease) -> None:
        """Carries out a command; what it names may be gone by now."""
        match command:
            case Offered():
                self.fetches.offered(command.fetch_id, command.offers, command.is_complete)
            case SourceLost():
                self.fetches.source_lost(command.fetch_id, command.reason)
            case Pulled():
                self.fetches.pulled(command.pull_id, command.error, command.transport, command.seconds)
                if self.leases.num_growing:  # who reads from here may want what has come
                    self.leases.look()
            case OpenLease():
                self.leases.open(command.lease_id, command.hashes, command.transfer_id)
            case CloseLease():
                self.leases.close(command.lease_id)

    def redirect(self, sequence: Sequence, source: KVSource | None) -> None:
        """The request of this first choice reads from another source, or none; too late once it has been
        admitted. One that others wait for never reads."""
        if sequence.parent.is_admitted or sequence.parent.request.transfer_id is not None:
            return
        self.fetches.release(sequence)
        if source is None:
            return
        try:
            check_source(source)
        except RequestRefused as refused:
            request_id = sequence.parent.request.request_id
            _log.warning("request %s cannot read elsewhere: %s", request_id, refused.message)
        else:
            self.fetches.want(sequence, source)

    def sweep(self) -> bool:
        """Ends what has been silent for too long; returns whether anything was."""
        if not self.has_timers:
            return False
        now_s = self._clock()
        if now_s - self._swept_s < _SWEEP_PERIOD_S:
            return False
        self._swept_s = now_s
        is_lease_over = self.leases.sweep()
        return self.fetches.sweep() or is_lease_over

    def yield_blocks(self) -> bool:
        """Gives up one fetch or else one lease, for a sequence that runs. False when none is left that holds
        blocks: what remains is in flight."""
        return self.fetches.yield_blocks() or self.leases.revoke_youngest()

    def gives_way(self) -> bool:
        """Nothing runs, and the first who waits has no room: yields blocks, and what is reserved for fetches,
        once that has lasted. Groups that read from each other might wait for each other's room."""
        now_s = self._clock()
        if self._short_since_s is None:
            self._short_since_s = now_s
        if now_s - self._short_since_s < _PATIENCE_S:
            return False
        return self.fetches.yield_blocks(and_demand=True) or self.leases.revoke_youngest()

    def note_admission(self) -> None:
        """Somebody had room."""
        self._short_since_s = None

    def tables(self) -> list[list[int]]:
        """Blocks by holder, for integrity checks."""
        return self.fetches.tables() + self.leases.tables()

    def check_integrity(self) -> None:
        """Asserts the invariants of both tables. Valid between steps."""
        self.fetches.check_integrity()
        self.leases.check_integrity()
