"""KV blocks that groups read from each other, in virtual time.

    open --latency--> the source pins and offers --latency--> the reader orders pulls
    pull --bytes at the reader's rate, one after the other--> Pulled, good if no block changed meanwhile
    close --latency--> the source unpins

Bytes take the reader's link; the source's is taken to be as fast and is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import NamedTuple

from cluster.simulate.group import SimGroup
from cluster.simulate.world import World
from workers.engine.exchange import CloseLease, Offered, OpenLease, Pulled
from workers.engine.leases import LeaseId
from workers.hashing import BlockHash
from workers.types import BlockOffer, BlockRead, GroupId, KVSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Between two groups."""

    bytes_per_s: float
    latency_s: float = 0.001  # of a message


class _Reading(NamedTuple):
    """One fetch and the lease that it has at its source."""

    reader: GroupId
    fetch_id: int
    source: GroupId


class Exchange:
    """All leases and pulls of a simulated cluster."""

    def __init__(self, world: World, network: Network, groups: Callable[[GroupId], SimGroup]) -> None:
        self._world = world
        self._network = network
        self._group = groups
        self._numbers = count(1)
        self._leases: dict[LeaseId, _Reading] = {}
        self._by_fetch: dict[tuple[GroupId, int], LeaseId] = {}
        self._free_s: dict[GroupId, float] = {}  # when the reader's link is free again

    def peers_of(self, reader: GroupId) -> SimPeers:
        """What the engine of a group is given."""
        return SimPeers(self, reader)

    def offered(self, lease_id: LeaseId, offers: tuple[BlockOffer, ...], is_complete: bool) -> None:
        """The listener of every group."""
        reading = self._leases.get(lease_id)
        if reading is not None:
            told = Offered(reading.fetch_id, offers, is_complete)
            self._world.after(self._network.latency_s, partial(self._group(reading.reader).submit, told))

    def open(self, reader: GroupId, fetch_id: int, source: KVSource, hashes: Sequence[BlockHash]) -> None:
        """Asks for a lease."""
        lease_id = LeaseId(f"lease {next(self._numbers)}")
        self._leases[lease_id] = _Reading(reader, fetch_id, source.group_id)
        self._by_fetch[reader, fetch_id] = lease_id
        owner = self._group(source.group_id)
        owner.leases.add(lease_id)
        command = OpenLease(lease_id, tuple(hashes), source.transfer_id)
        self._world.after(self._network.latency_s, partial(owner.submit, command))

    def pull(self, reader: GroupId, fetch_id: int, pull_id: int, blocks: Sequence[BlockRead]) -> None:
        """Orders a copy."""
        reading = self._leases[self._by_fetch[reader, fetch_id]]
        group = self._group(reader)
        seconds = len(blocks) * group.info.kv_bytes_per_block / self._network.bytes_per_s
        end_s = max(self._free_s.get(reader, 0.0), self._world.now_s) + seconds
        self._free_s[reader] = end_s
        done = partial(self._pulled, group, self._group(reading.source), pull_id, tuple(blocks), seconds)
        self._world.at(end_s, done)

    def close(self, reader: GroupId, fetch_id: int) -> None:
        """Gives the lease back."""
        lease_id = self._by_fetch.pop((reader, fetch_id), None)
        if lease_id is None:
            return
        owner = self._group(self._leases.pop(lease_id).source)
        owner.leases.discard(lease_id)
        self._world.after(self._network.latency_s, partial(owner.submit, CloseLease(lease_id)))

    def _pulled(
        self,
        reader: SimGroup,
        source: SimGroup,
        pull_id: int,
        blocks: tuple[BlockRead, ...],
        seconds: float,
    ) -> None:
        generations = source.engine.generations
        is_good = all(generations[block.source] == block.generation for block in blocks)
        error = None if is_good else "a block changed while it was read"
        reader.submit(Pulled(pull_id, error, "simulated", seconds))


class SimPeers:
    """Implements `workers.engine.fetch.KVPeers` for one group."""

    def __init__(self, exchange: Exchange, reader: GroupId) -> None:
        self._exchange = exchange
        self._reader = reader

    def open(self, fetch_id: int, source: KVSource, hashes: Sequence[BlockHash]) -> None:
        """See KVPeers."""
        self._exchange.open(self._reader, fetch_id, source, hashes)

    def pull(self, fetch_id: int, pull_id: int, blocks: Sequence[BlockRead]) -> None:
        """See KVPeers."""
        self._exchange.pull(self._reader, fetch_id, pull_id, blocks)

    def close(self, fetch_id: int) -> None:
        """See KVPeers."""
        self._exchange.close(self._reader, fetch_id)
