"""Tables with one guard taken out each: what a race test must notice."""

from __future__ import annotations

from collections.abc import Callable

from tests.unit.exchange.world import Group
from workers.engine.exchange import KVExchange
from workers.engine.fetch import FetchState
from workers.engine.fetch_table import FetchTable
from workers.engine.leases import LeaseId, LeaseTable
from workers.engine.prefixes import PrefixesInProgress
from workers.engine.sequence import Sequence
from workers.hashing import BlockHash


def fetches(broken: type[FetchTable]) -> Callable[[Group], None]:
    """Gives every group this table of fetches."""

    def prepare(group: Group) -> None:
        group.exchange.fetches.__class__ = broken

    return prepare


def leases(broken: type[LeaseTable]) -> Callable[[Group], None]:
    """Gives every group this table of leases."""

    def prepare(group: Group) -> None:
        group.exchange.leases.__class__ = broken

    return prepare


def exchange(broken: type[KVExchange]) -> Callable[[Group], None]:
    """Gives every group this exchange."""

    def prepare(group: Group) -> None:
        group.exchange.__class__ = broken

    return prepare


def prefixes(broken: type[PrefixesInProgress]) -> Callable[[Group], None]:
    """Gives every group this list of what is computed."""

    def prepare(group: Group) -> None:
        group.exchange.fetches._in_progress.__class__ = broken

    return prepare


class WaitsForAllFetches(PrefixesInProgress):
    """Lets a request that another group waits for wait for blocks of that group."""

    def last_shared(self, sequence: Sequence, first: int, end: int) -> BlockHash | None:
        last = None
        for block_hash in sequence.hashes[first:end]:
            if not self.is_computing(block_hash):
                break
            last = block_hash
        return last


class FreesInFlight(FetchTable):
    """Takes the end of a request for the end of its pulls."""

    def release(self, sequence: Sequence) -> None:
        fetch = sequence.parent.fetch
        super().release(sequence)
        self._free_pulls_of(fetch)

    def yield_blocks(self, *, and_demand: bool = False) -> bool:
        before = [*self._open.values(), *self._over.values()]
        has_yielded = super().yield_blocks(and_demand=and_demand)
        for fetch in before:
            if fetch.state is FetchState.OVER:
                self._free_pulls_of(fetch)
        return has_yielded

    def _free_pulls_of(self, fetch: object) -> None:
        for pull_id, pull in list(self._pulls.items()):
            if pull.fetch is fetch:
                del self._pulls[pull_id]
                self.num_in_flight -= len(pull.blocks)
                pull.fetch.num_in_flight -= len(pull.blocks)
                self._pool.free_table(pull.blocks)


class IgnoresLatePulls(FetchTable):
    """What arrives for nobody is nobody's to free."""

    def pulled(self, pull_id: int, error: str | None, transport: str = "", seconds: float = 0.0) -> None:
        pull = self._pulls[pull_id]
        if pull.fetch.state is FetchState.OPEN:
            super().pulled(pull_id, error, transport, seconds)
        else:
            del self._pulls[pull_id]
            self.num_in_flight -= len(pull.blocks)


class FreesForEverybody(FetchTable):
    """Frees a block, not its own hold of it."""

    def release(self, sequence: Sequence) -> None:
        fetch = sequence.parent.fetch
        for block in fetch.held if fetch is not None else ():
            while self._pool.num_owners(block) > 1:
                self._pool.free(block)
        super().release(sequence)


class TrustsLatePulls(FreesInFlight):
    """Gives blocks in flight to others, and seals them all the same when they arrive."""

    def _free_pulls_of(self, fetch: object) -> None:
        for pull in self._pulls.values():
            if pull.fetch is fetch and pull.fetch.num_in_flight:
                self._pool.free_table(pull.blocks)


class DeafToLoss(FetchTable):
    """Waits for a source that is gone."""

    def source_lost(self, fetch_id: int, reason: str) -> None:
        pass

    def sweep(self) -> bool:
        return False


class PinsByItself(LeaseTable):
    """Pins what a request has computed, for a reader that will surely come."""

    def request_ended(self, transfer_id: str) -> None:
        super().request_ended(transfer_id)
        self.open(LeaseId(transfer_id), sorted(self._pool.cached_hashes()), None)


class StopsAtTheFirst(LeaseTable):
    """Takes leases for ordered by their end."""

    def sweep(self) -> bool:
        for lease_id, lease in list(self._leases.items()):
            if self._clock() - lease.renewed_s <= self._terms.expire_s:
                break
            self.close(lease_id)
        return True


class NeverSweeps(KVExchange):
    """Has no timer: looks after leases when there is something to compute, and there is nothing."""

    def sweep(self) -> bool:
        return False


class ForgetsRefusals(LeaseTable):
    """Lets readers wait for a request that was refused."""

    def request_refused(self, transfer_id: str) -> None:
        pass


class EndsWithTheFirst(LeaseTable):
    """Takes the end of one request of a transfer for the end of all."""

    def request_ended(self, transfer_id: str) -> None:
        self._computing.pop(transfer_id, None)
        self._remember(transfer_id)
