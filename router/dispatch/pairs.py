"""What a router has learnt of each pair of groups that exchange KV blocks: how fast, and whether at all.

A rate is what the reading group tells of its reads, for all routers together: bytes that came, by the seconds
in which they were on their way. What a reader waits for before the first byte, as for a step of the source to
end, says nothing about the way between the two. Whether reads bring anything, each router sees for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from router.dispatch.interface import PairState
from router.routing.pairing import Pair
from workers.types import GroupId, GroupInfo, SourceReads

_MIN_OBSERVED_BYTES = 64 << 10  # less says more about steps than about the rate
_LEARNING_RATE = 0.2  # least share of a new observation in the mean; the first ones count fully
_MIN_S = 1e-3  # one read is not told from another below this
_MAX_FAILED_IN_A_ROW = 1  # one may have been for want of memory
_BARRED_S = 10.0


@dataclass(slots=True)
class _Known:
    num_reads: int = 0  # that brought something
    num_failed: int = 0
    num_failed_in_a_row: int = 0
    num_bytes: int = 0
    told_blocks: int = 0  # by the reader, when the rate was learnt last
    told_s: float = 0.0
    num_rates: int = 0
    bytes_per_s: float = 0.0


class PairTable:
    """Pairs of connected groups. Lives on the router's event loop."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` is monotonic seconds."""
        self._clock = clock
        self._pairs: dict[Pair, _Known] = {}
        self._rates: dict[Pair, float] = {}  # of those that have been measured
        self._barred: dict[Pair, float] = {}  # until when

    def hear(self, reader: GroupInfo, told: Sequence[SourceReads], present: Container[GroupId]) -> None:
        """What a group tells of its reads in all; to be called as often as one likes. `present`: groups that
        are connected: a reader remembers others too."""
        for reads in told:
            if reads.group_id not in present or not reads.num_blocks:
                continue
            known = self._pairs.setdefault((reads.group_id, reader.group_id), _Known())
            num_blocks, seconds = reads.num_blocks - known.told_blocks, reads.seconds - known.told_s
            if num_blocks < 0:  # it had forgotten the source, and counts anew
                num_blocks, seconds = reads.num_blocks, reads.seconds
            num_bytes = num_blocks * reader.kv_bytes_per_block
            if num_bytes < _MIN_OBSERVED_BYTES:
                continue
            known.told_blocks, known.told_s = reads.num_blocks, reads.seconds
            known.num_rates += 1
            share = max(_LEARNING_RATE, 1.0 / known.num_rates)
            known.bytes_per_s += share * (num_bytes / max(seconds, _MIN_S) - known.bytes_per_s)
            self._rates[reads.group_id, reader.group_id] = known.bytes_per_s

    def on_read(self, pair: Pair, num_bytes: int) -> None:
        """A request of this router has had blocks read."""
        known = self._pairs.setdefault(pair, _Known())
        known.num_reads += 1
        known.num_bytes += num_bytes
        known.num_failed_in_a_row = 0

    def on_failed(self, pair: Pair) -> None:
        """Nothing came although the source had it. The second time the pair is left alone for a while."""
        known = self._pairs.setdefault(pair, _Known())
        known.num_failed += 1
        known.num_failed_in_a_row += 1
        if known.num_failed_in_a_row > _MAX_FAILED_IN_A_ROW:
            self._barred[pair] = self._clock() + _BARRED_S

    def drop(self, group_id: GroupId) -> None:
        """A group is gone; what is known of its pairs is not true of its successor."""
        for table in (self._pairs, self._rates, self._barred):
            for pair in [pair for pair in table if group_id in pair]:
                del table[pair]

    def rates(self) -> Mapping[Pair, float]:
        """Bytes a second of the pairs that have been measured: a view, always of now."""
        return MappingProxyType(self._rates)

    def barred(self) -> frozenset[Pair]:
        """Pairs that have failed of late."""
        now_s = self._clock()
        for pair in [pair for pair, until_s in self._barred.items() if until_s <= now_s]:
            del self._barred[pair]
        return frozenset(self._barred)

    def states(self) -> list[PairState]:
        """All pairs, by their ids."""
        return [
            PairState(
                *pair,
                known.num_reads,
                known.num_failed,
                known.bytes_per_s if known.num_rates else None,
                known.num_bytes,
            )
            for pair, known in sorted(self._pairs.items())
        ]
