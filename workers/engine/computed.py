"""What becomes of a sequence's blocks when more of its tokens are computed.

    released    no row will read them again: given back, their places in the table stay
    sealed      full, and offered to the prefix cache
    open        the last one

    0 <= num_released, and <= num_sealed where prefixes are reused (without, nothing is sealed);
    blocks in front of num_released belong to whoever has them now

Blocks are released in models whose every layer has a sliding window. A released block stays findable by its
hash until it is evicted, as those of a finished request do.

In models with two sets of rotary frequencies, by the length of the sequence, one that grows past the limit
between them has to be computed again, all of it, before the step that makes it longer.
"""

from __future__ import annotations

from collections.abc import Iterable

from workers.engine.block_pool import BlockPool
from workers.engine.prefixes import PrefixesInProgress
from workers.engine.request import EngineLimits
from workers.engine.sequence import Sequence

# Attention kernels take keys in groups of as many positions, aligned from the start of a sequence, and may
# look at a whole group when a row sees one of it (workers/kernels/interface.py).
_GROUP = 64


class ComputedBlocks:
    """Seals and releases blocks. Used by the scheduler."""

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        prefix_reuse: bool,
        limits: EngineLimits,
        in_progress: PrefixesInProgress,
        keeps_all: bool,
    ) -> None:
        """keeps_all: nothing is released, whatever the window."""
        self._pool = pool
        self._block_size = block_size
        self._prefix_reuse = prefix_reuse
        self._window = None if keeps_all else limits.window
        self._recompute_past = limits.recompute_past
        self._in_progress = in_progress

    def note(self, sequence: Sequence) -> None:
        """Its num_computed has grown."""
        if sequence.num_computed - sequence.num_sealed * self._block_size >= self._block_size:
            self._seal(sequence)
        if self._window is not None and sequence.search is None:
            self._release(sequence, self._window)

    def outgrown(self, running: Iterable[Sequence]) -> list[Sequence]:
        """Those that the next step would make longer than their keys are good for; each is named once."""
        if self._recompute_past is None:
            return []
        found = [s for s in running if s.num_computed == self._recompute_past and not s.is_outgrown]
        for sequence in found:
            sequence.is_outgrown = True
        return found

    def spoil(self, sequence: Sequence) -> None:
        """None of its blocks is to be trusted, those that it has given back included."""
        table, num_released = sequence.block_table, sequence.num_released
        for block, block_hash in zip(table[:num_released], sequence.hashes, strict=False):
            if self._pool.find(block_hash) == block:
                self._pool.spoil(block)
        for block in sequence.held_blocks:
            self._pool.spoil(block)

    def _seal(self, sequence: Sequence) -> None:
        if not self._prefix_reuse:
            return
        for index in range(sequence.num_sealed, sequence.num_computed // self._block_size):
            block_hash = sequence.hash_of_block(index, self._block_size)
            self._pool.seal(sequence.block_table[index], block_hash)
            self._in_progress.finish(sequence, block_hash)
        sequence.num_sealed = sequence.num_computed // self._block_size

    def _release(self, sequence: Sequence, window: int) -> None:
        """The next row is that of position num_computed."""
        first_seen = max(0, sequence.num_computed - window + 1) // _GROUP * _GROUP
        end = first_seen // self._block_size
        if end > sequence.num_released:
            self._pool.free_table(sequence.block_table[sequence.num_released : end])
            sequence.num_released = end
