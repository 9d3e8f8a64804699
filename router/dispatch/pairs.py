"""What a router has learnt of each pair of groups that exchange KV blocks: how fast, and whether at all.

A rate is that of a whole read as a request sees it: from when the blocks were there to be read until the
first token, without what else took time. So the part of a read that goes on while the source still computes
costs nothing, as it should.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from router.dispatch.interface import PairState
from router.routing.pairing import Pair
from workers.types import GroupId

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

    def on_read(self, pair: Pair, num_bytes: int, seconds: float) -> None:
        """Blocks have come; `seconds` is what they took beside everything else that the request did."""
        known = self._pairs.setdefault(pair, _Known())
        known.num_reads += 1
        known.num_bytes += num_bytes
        known.num_failed_in_a_row = 0
        if num_bytes < _MIN_OBSERVED_BYTES:
            return
        known.num_rates += 1
        share = max(_LEARNING_RATE, 1.0 / known.num_rates)
        known.bytes_per_s += share * (num_bytes / max(seconds, _MIN_S) - known.bytes_per_s)
        self._rates[pair] = known.bytes_per_s

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
