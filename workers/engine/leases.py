"""Blocks of this group that other groups read, and how long they are kept for them.

    --open--> growing --> complete --> gone: closed by its reader, not renewed, or revoked

A lease wants a chain of block hashes. Every block of it that is cached here gets a reference (it is pinned)
and is offered to the reader, in the order of the chain, up to the first that is not cached. A lease that
names the transfer of a request grows: further blocks are pinned and offered as the request seals them. It is
complete when no further block will come: it has all, or names no transfer, or the request with that transfer
has ended, or none has come in time. A complete lease only pins.

Only the reader opens a lease, so a request that nobody reads from pins nothing. A lease holds nothing for
ever: its reader renews it, from a thread that waits for no step. It may be revoked when memory is short: the
reader compares generations and does not mistake what is written into the block then.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NewType

from workers.engine.block_pool import BlockPool
from workers.engine.request import is_transfer_id
from workers.hashing import BlockHash
from workers.types import BlockOffer

LeaseId = NewType("LeaseId", str)  # never used twice

# (lease, further blocks, whether they were the last), in the engine's thread.
OfferListener = Callable[[LeaseId, tuple[BlockOffer, ...], bool], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTerms:
    """Times and sizes of leases."""

    expire_s: float = 10.0  # after the last renewal
    expect_s: float = 5.0  # a request with the lease's transfer has to come within
    max_leases: int = 4096  # more are refused
    max_remembered: int = 4096  # transfers whose request has ended, for leases that are opened later


class _Lease:
    __slots__ = ("blocks", "hashes", "opened_s", "renewed_s", "transfer_id")

    def __init__(self, hashes: tuple[BlockHash, ...], transfer_id: str | None, now_s: float) -> None:
        self.hashes = hashes
        self.transfer_id = transfer_id
        self.blocks: list[int] = []  # pinned, of the first hashes
        self.opened_s = now_s
        self.renewed_s = now_s


class LeaseTable:
    """All leases of a group. Used by the engine's thread; renew() by any."""

    def __init__(
        self,
        *,
        pool: BlockPool,
        on_offer: OfferListener,
        clock: Callable[[], float],
        terms: LeaseTerms | None = None,
    ) -> None:
        self._pool = pool
        self._on_offer = on_offer
        self._clock = clock
        self._terms = terms or LeaseTerms()
        self._leases: dict[LeaseId, _Lease] = {}  # in the order of opening
        self._growing: dict[LeaseId, _Lease] = {}  # those that are not complete
        self._computing: Counter[str] = Counter()  # unfinished requests by transfer
        self._ended: OrderedDict[str, None] = OrderedDict()  # transfers that had a request
        self.expired_total = 0

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def num_growing(self) -> int:
        """Leases that more blocks may come for: only then look() has anything to do."""
        return len(self._growing)

    @property
    def is_pinning(self) -> bool:
        """Whether any block is held."""
        return any(lease.blocks for lease in self._leases.values())

    def tables(self) -> list[list[int]]:
        """Pinned blocks by lease, for integrity checks."""
        return [lease.blocks for lease in self._leases.values()]

    # -- from readers -------------------------------------------------------------------------------------

    def open(self, lease_id: LeaseId, hashes: Sequence[BlockHash], transfer_id: str | None) -> None:
        """Pins and offers what there is. A lease that cannot be is complete at once, with nothing; a second
        one of the same name is ignored."""
        if lease_id in self._leases:
            return
        is_sound = (
            0 < len(hashes) <= self._pool.num_blocks
            and len(set(hashes)) == len(hashes)
            and (transfer_id is None or is_transfer_id(transfer_id))
        )
        if not is_sound or len(self._leases) >= self._terms.max_leases:
            self._on_offer(lease_id, (), True)
            return
        lease = _Lease(tuple(hashes), transfer_id, self._clock())
        self._leases[lease_id] = self._growing[lease_id] = lease
        self._look_at(lease_id, lease)

    def renew(self, lease_id: LeaseId) -> None:
        """The reader lives. May be called in any thread: one look-up and one store, both atomic."""
        lease = self._leases.get(lease_id)
        if lease is not None:
            lease.renewed_s = self._clock()

    def close(self, lease_id: LeaseId) -> None:
        """The reader has what it wanted, or is gone. Unknown leases are ignored."""
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            return
        self._growing.pop(lease_id, None)
        self._pool.free_table(lease.blocks)

    def close_all(self) -> None:
        """Nobody can read here any more."""
        for lease_id in list(self._leases):
            self.close(lease_id)

    # -- from this group ----------------------------------------------------------------------------------

    def request_came(self, transfer_id: str) -> None:
        """A request computes the blocks of this transfer. Each call is followed by one of request_ended()."""
        self._computing[transfer_id] += 1

    def request_ended(self, transfer_id: str) -> None:
        """The request has ended, however it did; what it has sealed is still to be found by look()."""
        self._computing[transfer_id] -= 1
        if self._computing[transfer_id] == 0:
            del self._computing[transfer_id]
        self._remember(transfer_id)

    def request_refused(self, transfer_id: str) -> None:
        """A request of this transfer came and will not be computed."""
        self._remember(transfer_id)

    def look(self) -> None:
        """Pins and offers what has been sealed. To be called after each step while leases grow, before any
        block is given out again: what was sealed may be evicted then."""
        for lease_id, lease in list(self._growing.items()):
            self._look_at(lease_id, lease)

    def sweep(self) -> bool:
        """Ends every lease that was not renewed, and the waiting for requests that do not come. Returns
        whether any lease ended. To be called by a timer, also when nothing is computed."""
        now_s = self._clock()
        late = [
            lease_id
            for lease_id, lease in self._leases.items()
            if now_s - lease.renewed_s > self._terms.expire_s
        ]
        for lease_id in late:
            self._end_early(lease_id)
        self.expired_total += len(late)
        self.look()
        return bool(late)

    def revoke_youngest(self) -> bool:
        """Takes the blocks of the lease opened last that has any. False when no block is pinned."""
        for lease_id, lease in reversed(self._leases.items()):
            if lease.blocks:
                self._end_early(lease_id)
                return True
        return False

    def check_integrity(self) -> None:
        """Asserts what each lease has and how many grow."""
        assert self._growing.keys() <= self._leases.keys(), f"ended and growing: {list(self._growing)}"
        for lease_id, lease in self._leases.items():
            assert len(lease.blocks) <= len(lease.hashes), f"{lease_id} has more than it wants"
            has_all = len(lease.blocks) == len(lease.hashes)
            assert not (has_all and lease_id in self._growing), f"{lease_id} has all and grows"
        assert min(self._computing.values(), default=1) > 0, f"no request counted: {self._computing}"

    def _look_at(self, lease_id: LeaseId, lease: _Lease) -> None:
        offers = tuple(self._pin(lease))
        is_complete = len(lease.blocks) == len(lease.hashes) or not self._expects_more(lease)
        if is_complete:
            del self._growing[lease_id]
        if offers or is_complete:
            self._on_offer(lease_id, offers, is_complete)

    def _pin(self, lease: _Lease) -> Iterable[BlockOffer]:
        for index in range(len(lease.blocks), len(lease.hashes)):
            block = self._pool.find(lease.hashes[index])
            if block is None:
                break
            self._pool.share(block)
            lease.blocks.append(block)
            yield BlockOffer(index=index, block=block, generation=self._pool.generations[block])

    def _expects_more(self, lease: _Lease) -> bool:
        transfer_id = lease.transfer_id
        if transfer_id is None:
            return False
        if transfer_id in self._computing:
            return True
        return transfer_id not in self._ended and self._clock() - lease.opened_s < self._terms.expect_s

    def _end_early(self, lease_id: LeaseId) -> None:
        """Ends a lease whose reader has not asked for it; it hears of that if it waits for blocks."""
        is_waited_for = lease_id in self._growing
        self.close(lease_id)
        if is_waited_for:
            self._on_offer(lease_id, (), True)

    def _remember(self, transfer_id: str) -> None:
        self._ended[transfer_id] = None
        self._ended.move_to_end(transfer_id)
        if len(self._ended) > self._terms.max_remembered:
            self._ended.popitem(last=False)
