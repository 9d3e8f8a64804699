"""Which blocks are being computed right now, so that nobody computes them a second time.

An admitted sequence announces the hashes of the full blocks that it will compute. A waiting sequence that
needs one of them next is better off waiting: once sealed, the block is its for nothing. Entries live only as
long as their sequence runs, and a running sequence always gets on or is preempted, so nobody waits for ever.
The same goes for blocks that a waiting sequence has read from another group, as long as that goes on; only
a request that other groups wait for does not wait for them: two groups might wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterable

from workers.engine.sequence import Sequence
from workers.hashing import BlockHash


class PrefixesInProgress:
    """Announced block hashes and the sequence that computes each."""

    def __init__(self) -> None:
        self._computing: dict[BlockHash, Sequence] = {}

    def __len__(self) -> int:
        return len(self._computing)

    def is_computing(self, block_hash: BlockHash) -> bool:
        return block_hash in self._computing

    def announce(self, sequence: Sequence) -> None:
        """The sequence, just admitted, will compute the full blocks after its sealed ones. First come, first
        named."""
        for block_hash in sequence.hashes[sequence.num_sealed :]:
            self._computing.setdefault(block_hash, sequence)

    def announce_fetched(self, sequence: Sequence, block_hashes: Iterable[BlockHash]) -> None:
        """These blocks of a waiting sequence are on their way here."""
        for block_hash in block_hashes:
            self._computing.setdefault(block_hash, sequence)

    def finish(self, sequence: Sequence, block_hash: BlockHash) -> None:
        """The sequence has sealed this block, or it will not come."""
        if self._computing.get(block_hash) is sequence:
            del self._computing[block_hash]

    def withdraw(self, sequence: Sequence) -> None:
        """The sequence will not compute what it has not sealed: it ended or was preempted."""
        for block_hash in sequence.hashes[sequence.num_sealed :]:
            self.finish(sequence, block_hash)

    def last_shared(self, sequence: Sequence, first: int, end: int) -> BlockHash | None:
        """What `sequence` should wait for: the last of its blocks first, first + 1, ... end - 1 that are all
        being computed. None when nobody computes block `first`, or only someone less urgent."""
        last = None
        for block_hash in sequence.hashes[first:end]:
            owner = self._computing.get(block_hash)
            if owner is None or owner.key[0] > sequence.key[0]:
                break
            if owner.parent.fetch is not None and sequence.parent.request.transfer_id is not None:
                break
            last = block_hash
        return last

    def check_integrity(self) -> None:
        """Asserts that every entry belongs to a sequence that has blocks and has yet to seal it, or that has
        it fetched."""
        for block_hash, sequence in self._computing.items():
            fetch = sequence.parent.fetch
            if fetch is not None:
                assert block_hash in fetch.wanted, f"{sequence.key} announces a block that is not fetched"
                continue
            assert sequence.block_table, f"{sequence.key} announces a block and has none"
            assert block_hash in sequence.hashes[sequence.num_sealed :], (
                f"{sequence.key} announces a sealed block"
            )
