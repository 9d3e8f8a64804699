"""Blocks that this group reads from other groups instead of computing them.

    WANTED --start--> OPEN --all arrived, or given up--> OVER --its request admitted or ended--> gone

A request that names a source has one fetch. While it is wanted or open its sequences wait; then they are
admitted like any others and find what has arrived by its hash. So a fetch can only save work: whatever it
does not bring is computed here.

    start    asks the source for a lease on the blocks that are missing here
    offered  own blocks are reserved for those that the source has, and a pull of their bytes is ordered
    pulled   the bytes are here: the blocks are sealed, and held until the request is admitted

Blocks that a pull writes into belong to the pull until it is reported to have ended, well or badly. Nothing
else frees them, not even the end of their request: a time-out is not an acknowledgement.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from workers.engine.block_pool import BlockPool
from workers.engine.demand import OutputLengthEstimate
from workers.engine.fetch import Fetch, FetchEnd, FetchState, KVPeers
from workers.engine.prefixes import PrefixesInProgress
from workers.engine.pull_meter import PullMeter
from workers.engine.reads import ReadCounts
from workers.engine.sequence import Sequence as TokenSequence
from workers.hashing import BlockHash
from workers.types import BlockOffer, BlockRead, KVSource

_MAX_PULL_BLOCKS: Final = 64  # in one pull: progress is seen, and memory given back, in these portions

_log = logging.getLogger(__name__)


class _Pull(NamedTuple):
    fetch: Fetch
    hashes: tuple[BlockHash, ...]
    blocks: list[int]
    ordered_s: float


class FetchTable:
    """All fetches of a group. Used by the engine's thread."""

    def __init__(
        self,
        *,
        pool: BlockPool,
        block_size: int,
        in_progress: PrefixesInProgress,
        peers: KVPeers | None,
        clock: Callable[[], float],
        stall_s: float,
    ) -> None:
        """peers None: sources are ignored. stall_s: that a source may say nothing of a fetch."""
        self._pool = pool
        self._block_size = block_size
        self._in_progress = in_progress
        self._peers = peers
        self._clock = clock
        self._stall_s = stall_s
        self._open: dict[int, Fetch] = {}
        self._over: dict[int, Fetch] = {}  # whose request has not been admitted
        self._pulls: dict[int, _Pull] = {}
        self._num_started = 0
        self._num_pulls = 0
        self.meter = PullMeter()
        self.num_wanted = 0
        self.num_in_flight = 0  # blocks
        self.fetched_tokens_total = 0
        self.counts = ReadCounts()
        self.ended_total = dict.fromkeys(FetchEnd, 0)

    def __len__(self) -> int:
        """Fetches that still hold something or wait for something."""
        return self.num_wanted + len(self._open) + len(self._over) + len(self._pulls)

    @property
    def started_total(self) -> int:
        return self._num_started

    @property
    def num_pulls(self) -> int:
        """Pulls under way."""
        return len(self._pulls)

    @property
    def is_busy(self) -> bool:
        """Whether a fetch or a pull is under way, which ends without the help of a step."""
        return bool(self._open or self._pulls)

    @property
    def demand(self) -> int:
        """Blocks that the requests of open fetches will ask for, beyond those they have."""
        return sum(
            max(0, fetch.expected_blocks - len(fetch.held) - fetch.num_in_flight)
            for fetch in self._open.values()
        )

    @property
    def coming_tokens(self) -> int:
        """Prompt tokens of waiting requests that open fetches are to bring, so nobody has to compute them."""
        return sum(len(fetch.wanted) for fetch in self._open.values()) * self._block_size

    def tables(self) -> list[list[int]]:
        """Held blocks by fetch and pull, for integrity checks."""
        fetches = [*self._open.values(), *self._over.values()]
        return [fetch.held for fetch in fetches] + [pull.blocks for pull in self._pulls.values()]

    # -- of requests --------------------------------------------------------------------------------------

    def want(self, sequence: TokenSequence, source: KVSource) -> None:
        """The request of this first choice, not admitted yet, has a source. An earlier one is forgotten."""
        self.release(sequence)
        if self._peers is not None:
            sequence.parent.fetch = Fetch(sequence, source)
            self.num_wanted += 1

    def start_wanted(
        self,
        waiting: Sequence[TokenSequence],
        estimate: OutputLengthEstimate,
        demand: int,
        *,
        is_idle: bool,
    ) -> None:
        """Starts fetches in the order of service as far as memory will do for them, for all who wait before
        them, and for `demand` blocks more. When nothing runs (is_idle) and nothing is under way, the first
        needs no room."""
        demand += self.demand
        for sequence in waiting:
            if self.num_wanted == 0:
                break
            fetch = sequence.parent.fetch
            expected = estimate.expected_blocks(sequence)
            if fetch is None or fetch.state is FetchState.OVER:
                demand += expected - (len(fetch.held) if fetch is not None else 0)
                if demand > self._pool.num_available:
                    break
            elif fetch.state is FetchState.WANTED and sequence is fetch.sequence:
                if not self._is_free_to_start(sequence):
                    continue
                fresh, revived = self._need(sequence, expected)
                is_first = is_idle and not self.is_busy
                if not is_first and demand + fresh + revived > self._pool.num_available:
                    break
                self._start(fetch, expected)
                demand += fresh

    def release(self, sequence: TokenSequence) -> None:
        """The request has been admitted, or has ended: what it holds is free, what it waits for not wanted.
        Only blocks in flight stay, until their pull has ended."""
        fetch = sequence.parent.fetch
        if fetch is None:
            return
        sequence.parent.fetch = None
        if fetch.state is FetchState.WANTED:
            self.num_wanted -= 1
            fetch.state = FetchState.OVER
            return
        if fetch.state is FetchState.OPEN:
            self._end(fetch, FetchEnd.DROPPED)
        self._over.pop(fetch.id, None)
        self._free_held(fetch)

    def yield_blocks(self, *, and_demand: bool = False) -> bool:
        """Gives up the fetch latest in the order of service that has blocks, or, with `and_demand`, that
        keeps others from having them. False when none has any that could be freed, now or with the end of a
        pull."""
        candidates = [
            fetch for fetch in self._open.values() if and_demand or fetch.held or fetch.num_in_flight
        ]
        candidates += [fetch for fetch in self._over.values() if fetch.held]
        if not candidates:
            return False
        fetch = max(candidates, key=lambda candidate: candidate.sequence.key)
        if fetch.state is FetchState.OPEN:
            self._end(fetch, FetchEnd.NO_MEMORY)
        self._free_held(fetch)
        return True

    # -- of the other side --------------------------------------------------------------------------------

    def offered(self, fetch_id: int, offers: Sequence[BlockOffer], is_complete: bool) -> None:
        """The source has these blocks, and no more will come if is_complete. With neither it says that it
        still works on them."""
        fetch = self._open.get(fetch_id)
        if fetch is None:
            return
        start, end = fetch.num_offered, fetch.num_offered + len(offers)
        is_sound = end <= len(fetch.wanted) and all(
            offer.index == index and offer.block >= 0 and offer.generation >= 0
            for index, offer in enumerate(offers, start)
        )
        if not is_sound:
            _log.warning("source %s offers blocks that were not asked for", fetch.source.group_id)
            self._end(fetch, FetchEnd.VOID)
        elif len(offers) > self._pool.num_available:
            self._end(fetch, FetchEnd.NO_MEMORY)
        else:
            fetch.progress_s = self._clock()
            if offers:
                fetch.num_offered = end
                self._pull(fetch, offers)
            fetch.source_is_done |= is_complete
            self._end_if_done(fetch)

    def source_lost(self, fetch_id: int, reason: str) -> None:
        """The source is gone or has refused: no offer will come any more."""
        fetch = self._open.get(fetch_id)
        if fetch is not None:
            _log.warning("source %s is lost: %s", fetch.source.group_id, reason)
            self._end(fetch, FetchEnd.LOST)

    def pulled(self, pull_id: int, error: str | None, transport: str = "", seconds: float = 0.0) -> None:
        """Nothing will be written into the pull's blocks any more; without an error they are whole, came by
        this transport, and kept it busy for `seconds`."""
        pull = self._pulls.pop(pull_id, None)
        if pull is None:
            return
        fetch = pull.fetch
        self.meter.observe(
            fetch.source.group_id,
            transport,
            num_blocks=len(pull.blocks),
            seconds=self._clock() - pull.ordered_s,
            has_failed=error is not None,
        )
        fetch.num_in_flight -= len(pull.blocks)
        self.num_in_flight -= len(pull.blocks)
        if error is not None:
            _log.warning("%d blocks of source %s: %s", len(pull.blocks), fetch.source.group_id, error)
            for block in pull.blocks:
                self._pool.spoil(block)  # nobody knows what has been written
            self._pool.free_table(pull.blocks)
            if fetch.state is FetchState.OPEN:
                self._end(fetch, FetchEnd.VOID)
            return
        fetch.num_arrived += len(pull.blocks)
        fetch.sequence.parent.num_fetched_blocks += len(pull.blocks)
        fetch.progress_s = self._clock()
        self.fetched_tokens_total += len(pull.blocks) * self._block_size
        self.counts.arrived(fetch.source.group_id, len(pull.blocks), transport, seconds)
        for block, block_hash in zip(pull.blocks, pull.hashes, strict=True):
            self._keep(fetch, block, block_hash)
        if fetch.state is FetchState.OPEN:
            self._end_if_done(fetch)
        elif fetch.sequence.parent.fetch is not fetch:  # nobody waits for them; they can be found
            self._free_held(fetch)

    def sweep(self) -> bool:
        """Gives up every fetch that makes no progress; returns whether one was. To be called by a timer."""
        now_s = self._clock()
        late = [fetch for fetch in self._open.values() if now_s - fetch.progress_s > self._stall_s]
        for fetch in late:
            _log.warning("source %s has sent nothing for %g s", fetch.source.group_id, self._stall_s)
            self._end(fetch, FetchEnd.STALLED)
        return bool(late)

    def check_integrity(self) -> None:
        """Asserts states and counts."""
        for fetches, state in ((self._open, FetchState.OPEN), (self._over, FetchState.OVER)):
            for fetch in fetches.values():
                assert fetch.state is state, f"fetch {fetch.id} is {fetch.state.value}, not {state.value}"
                assert fetch.sequence.parent.fetch is fetch, f"fetch {fetch.id} has no request"
                assert not fetch.sequence.parent.is_admitted, f"fetch {fetch.id} outlives its use"
        for fetch in self._open.values():
            flying = sum(len(pull.blocks) for pull in self._pulls.values() if pull.fetch is fetch)
            assert fetch.num_in_flight == flying, (
                f"fetch {fetch.id}: {fetch.num_in_flight}, {flying} in flight"
            )
            assert fetch.num_arrived + flying == fetch.num_offered <= len(fetch.wanted), (
                f"fetch {fetch.id}: {fetch.num_arrived} + {flying} of {fetch.num_offered} offered"
            )
        in_flight = sum(len(pull.blocks) for pull in self._pulls.values())
        assert self.num_in_flight == in_flight, f"{self.num_in_flight} in flight, {in_flight} found"

    # -- steps of one fetch -------------------------------------------------------------------------------

    def _is_free_to_start(self, sequence: TokenSequence) -> bool:
        """False while another sequence computes or fetches the next block that this one lacks."""
        if sequence.waits_for is None or not self._in_progress.is_computing(sequence.waits_for):
            readable = sequence.num_readable // self._block_size
            num_found = len(self._pool.find_chain(sequence.hashes[:readable]))
            sequence.waits_for = self._in_progress.last_shared(sequence, num_found, readable)
        return sequence.waits_for is None

    def _need(self, sequence: TokenSequence, expected: int) -> tuple[int, int]:
        """Blocks to allocate for the sequence until its end, and evictable ones that it will hold."""
        found = self._pool.find_chain(sequence.hashes[: sequence.num_readable // self._block_size])
        return expected - len(found), sum(self._pool.num_owners(block) == 0 for block in found)

    def _start(self, fetch: Fetch, expected_blocks: int) -> None:
        sequence = fetch.sequence
        self.num_wanted -= 1
        hashes = sequence.hashes[: sequence.num_readable // self._block_size]
        here = [(block_hash, self._pool.find(block_hash)) for block_hash in hashes]
        fetch.wanted = tuple(block_hash for block_hash, block in here if block is None)
        if not fetch.wanted:
            fetch.state = FetchState.OVER
            sequence.parent.fetch = None
            return
        fetch.held = [block for _, block in here if block is not None]
        for block in fetch.held:
            self._pool.share(block)
        self._num_started += 1
        fetch.id = self._num_started
        fetch.state = FetchState.OPEN
        fetch.expected_blocks = expected_blocks
        fetch.opened_s = fetch.progress_s = self._clock()
        self._open[fetch.id] = fetch
        self.counts.begun(fetch.source.group_id)
        self._in_progress.announce_fetched(sequence, fetch.wanted)
        assert self._peers is not None
        self._peers.open(fetch.id, fetch.source, fetch.wanted)

    def _pull(self, fetch: Fetch, offers: Sequence[BlockOffer]) -> None:
        assert self._peers is not None
        own = [self._pool.allocate_to_overwrite() for _ in offers]
        fetch.num_in_flight += len(own)
        self.num_in_flight += len(own)
        for start in range(0, len(own), _MAX_PULL_BLOCKS):
            part = offers[start : start + _MAX_PULL_BLOCKS]
            blocks = own[start : start + _MAX_PULL_BLOCKS]
            self._num_pulls += 1
            hashes = tuple(fetch.wanted[offer.index] for offer in part)
            self._pulls[self._num_pulls] = _Pull(fetch, hashes, blocks, self._clock())
            orders = [
                BlockRead(offer.block, offer.generation, block)
                for offer, block in zip(part, blocks, strict=True)
            ]
            self._peers.pull(fetch.id, self._num_pulls, orders)

    def _keep(self, fetch: Fetch, block: int, block_hash: BlockHash) -> None:
        """Makes an arrived block findable and holds it; if another has its hash by now, that one."""
        self._in_progress.finish(fetch.sequence, block_hash)
        if not self._pool.seal(block, block_hash):
            self._pool.free(block)
            found = self._pool.find(block_hash)
            assert found is not None
            self._pool.share(found)
            block = found
        fetch.held.append(block)

    def _end_if_done(self, fetch: Fetch) -> None:
        if fetch.num_arrived == len(fetch.wanted):
            self._end(fetch, FetchEnd.DONE)
        elif fetch.source_is_done and fetch.num_in_flight == 0:
            self._end(fetch, FetchEnd.INCOMPLETE)

    def _end(self, fetch: Fetch, end: FetchEnd) -> None:
        """Asks for nothing more. What has arrived stays held, what is in flight stays so."""
        assert self._peers is not None
        del self._open[fetch.id]
        fetch.state = FetchState.OVER
        self._over[fetch.id] = fetch
        self.ended_total[end] += 1
        self.counts.ended(fetch.source.group_id, end)
        fetch.sequence.parent.fetch_s += self._clock() - fetch.opened_s
        for block_hash in fetch.wanted:
            self._in_progress.finish(fetch.sequence, block_hash)
        self._peers.close(fetch.id)

    def _free_held(self, fetch: Fetch) -> None:
        held, fetch.held = fetch.held, []
        self._pool.free_table(held)
