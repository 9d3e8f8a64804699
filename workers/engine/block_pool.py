"""The paged KV pool's bookkeeping: who holds which block, and which blocks can be found again by hash.

A block is in one of three places:

    unused     no reference, no hash           allocate() takes these first
    evictable  no reference, found by hash     least recently freed goes first when nothing is unused
    active     one or more references          with a hash once sealed, if no other block had that hash

    unused --allocate--> active --seal--> active with hash --free--> evictable --share--> active
       ^                   |                                            |
       +-------free--------+                    allocate (evicts) ------+--> active, hash gone

A hash names one block. A sequence that computes what another block already holds keeps its duplicate,
unhashed, until its request ends: block tables only grow. All operations on one block are O(1).

A block's generation counts up before its content may change. Whoever reads blocks without holding them, as
other groups do, compares it before and after (a seqlock): equal means that the bytes belong together.

Every change of the hash index is published as a numbered event, so that a reader who applies them in order
knows exactly which hashes are here.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from workers.hashing import BlockHash
from workers.histogram import HistogramCell
from workers.report import BLOCK_S
from workers.types import BlockEvent, BlockEventKind


class BlockPool:
    """Blocks 0 .. num_blocks - 1. Used by one thread."""

    def __init__(self, num_blocks: int, first_generation: int = 0) -> None:
        """first_generation: of every block. Pools that follow each other in one place are best told apart by
        it, so that nobody takes a block of one for a block of the other."""
        if num_blocks < 1:
            raise ValueError(f"a KV pool of {num_blocks} blocks holds nothing; at least 1 is needed")
        self._num_blocks = num_blocks
        # (num_blocks,) int64. Written here only; read by anybody through the buffer protocol, in any thread.
        self.generations = array("q", [first_generation]) * num_blocks
        self._refs = [0] * num_blocks
        self._hashes: list[BlockHash | None] = [None] * num_blocks
        self._index: dict[BlockHash, int] = {}
        self._unused = list(range(num_blocks - 1, -1, -1))  # taken from the end: block 0 first
        self._evictable: OrderedDict[int, None] = OrderedDict()  # first one goes first
        self._spoiled: set[int] = set()  # with owners, and to be zeroed when the last one is gone
        self._to_zero: dict[int, None] = {}  # without an owner; in the order of marking
        self.now_s = 0.0  # of the owner's clock, kept by it; only how long blocks are kept depends on it
        self._sealed_s = [0.0] * num_blocks
        self.lifetime_s = HistogramCell(BLOCK_S)  # of evicted blocks, from when they were sealed
        self._num_events = 0
        self._changes: list[tuple[BlockEventKind, list[BlockHash]]] = []  # since take_events()

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def num_unused(self) -> int:
        return len(self._unused)

    @property
    def num_evictable(self) -> int:
        return len(self._evictable)

    @property
    def num_available(self) -> int:
        """Blocks that allocate() can still give."""
        return len(self._unused) + len(self._evictable)

    @property
    def num_active(self) -> int:
        return self._num_blocks - len(self._unused) - len(self._evictable)

    @property
    def evictions_total(self) -> int:
        """Blocks that lost their content to another owner."""
        return sum(self.lifetime_s.counts)

    def num_owners(self, block: int) -> int:
        return self._refs[block]

    def find(self, block_hash: BlockHash) -> int | None:
        """The block with these tokens, active or evictable. Changes nothing; valid until the next
        allocate()."""
        return self._index.get(block_hash)

    def find_chain(self, block_hashes: Iterable[BlockHash]) -> list[int]:
        """The blocks of the hashes up to the first that is not here. Changes nothing; valid until the next
        allocate()."""
        found = []
        for block_hash in block_hashes:
            block = self._index.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def cached_hashes(self) -> frozenset[BlockHash]:
        """All hashes that find() knows: what the events add up to."""
        return frozenset(self._index)

    def allocate(self) -> int:
        """A block for one owner, content unspecified; evicts the least recently freed when none is unused."""
        if self._unused:
            block = self._unused.pop()
        else:
            assert self._evictable, f"all {self._num_blocks} blocks are active; ask num_available first"
            block, _ = self._evictable.popitem(last=False)
            self._drop_hash(block)
            self.lifetime_s.observe(self.now_s - self._sealed_s[block])
        assert self._refs[block] == 0, f"block {block} was given out with {self._refs[block]} owners"
        self._refs[block] = 1
        self.generations[block] += 1
        return block

    def allocate_to_overwrite(self) -> int:
        """A block like allocate()'s that the owner writes as a whole before a step: it is not zeroed."""
        block = self.allocate()
        self._to_zero.pop(block, None)
        return block

    def zero(self, blocks: Iterable[int]) -> None:
        """Has blocks without an owner zeroed before the next step computes anything."""
        self._to_zero.update(dict.fromkeys(blocks))

    @property
    def may_zero(self) -> bool:
        """Whether there are blocks to zero, or with owners that may free them to be zeroed."""
        return bool(self._to_zero or self._spoiled)

    def take_zero_blocks(self) -> tuple[int, ...]:
        """Blocks that the next step has to zero before it writes; the caller sees to it."""
        blocks = tuple(self._to_zero)
        self._to_zero.clear()
        return blocks

    def share(self, block: int) -> None:
        """One more owner of a block that find() gave."""
        if self._refs[block] == 0:
            assert self._hashes[block] is not None, f"block {block} has no owner and no hash to share"
            del self._evictable[block]
        self._refs[block] += 1

    def free(self, block: int) -> None:
        """One owner less. The last one leaves it evictable when it has a hash, else unused."""
        assert self._refs[block] > 0, f"block {block} freed without an owner"
        self._refs[block] -= 1
        if self._refs[block] == 0:
            if self._hashes[block] is not None:
                self._evictable[block] = None
                return
            self._unused.append(block)
            if block in self._spoiled:
                self._spoiled.remove(block)
                self._to_zero[block] = None

    def free_table(self, block_table: Sequence[int]) -> None:
        """Frees a sequence's blocks from the last to the first: the end of a chain is useless without its
        beginning, so it has to be evicted first."""
        for block in reversed(block_table):
            self.free(block)

    def seal(self, block: int, block_hash: BlockHash) -> bool:
        """Makes a full block findable. False when another block already has the hash: this one is a
        duplicate; or when it was spoiled."""
        assert self._refs[block] > 0, f"block {block} sealed without an owner"
        assert self._hashes[block] is None, f"block {block} sealed twice"
        if block_hash in self._index or block in self._spoiled:
            return False
        self._hashes[block] = block_hash
        self._index[block_hash] = block
        self._sealed_s[block] = self.now_s
        self._publish(BlockEventKind.STORED, block_hash)
        return True

    def spoil(self, block: int) -> None:
        """The block's content is not to be trusted: nobody finds it any more, readers elsewhere see its
        generation change, and once it has no owner it is zeroed before the next step."""
        self.generations[block] += 1
        if self._hashes[block] is not None:
            self._drop_hash(block)
            if self._refs[block] == 0:
                del self._evictable[block]
                self._unused.append(block)
        if self._refs[block] == 0:
            self._to_zero[block] = None
        else:
            self._spoiled.add(block)

    def take_events(self) -> list[BlockEvent]:
        """Changes of the hash index since the last call, in order; neighbours of one kind share an event."""
        events = []
        for kind, hashes in self._changes:
            self._num_events += 1
            events.append(BlockEvent(number=self._num_events, kind=kind, block_hashes=tuple(hashes)))
        self._changes.clear()
        return events

    def check_integrity(self, block_tables: Iterable[Sequence[int]] | None = None) -> None:
        """Asserts every invariant; with the tables of all owners also that references are theirs and no
        others.

        O(blocks): for tests and when idle.
        """
        unused, evictable = set(self._unused), set(self._evictable)
        active = {block for block, refs in enumerate(self._refs) if refs > 0}
        assert min(self._refs) >= 0, f"negative reference count in {self._refs}"
        assert len(unused) == len(self._unused), f"a block is listed as unused twice: {self._unused}"
        assert not unused & evictable, f"unused and evictable at once: {unused & evictable}"
        assert not active & (unused | evictable), f"owned and free at once: {active & (unused | evictable)}"
        total = len(unused) + len(evictable) + len(active)
        assert total == self._num_blocks, f"{total} blocks accounted for, the pool has {self._num_blocks}"
        assert self.num_active == len(active), f"num_active {self.num_active}, owned {len(active)}"
        hashed = {block: found for block, found in enumerate(self._hashes) if found is not None}
        assert len(hashed) == len(self._index), (
            f"{len(hashed)} blocks hashed, {len(self._index)} in the index"
        )
        for block, block_hash in hashed.items():
            assert self._index[block_hash] == block, f"block {block} is not the one its hash names"
        assert self._spoiled <= active, f"spoiled without an owner: {self._spoiled - active}"
        assert not self._spoiled & hashed.keys(), f"spoiled and findable: {self._spoiled & hashed.keys()}"
        assert not unused & hashed.keys(), f"unused but findable: {unused & hashed.keys()}"
        assert evictable <= hashed.keys(), f"evictable but not findable: {evictable - hashed.keys()}"
        if block_tables is not None:
            owners: Counter[int] = Counter()
            for table in block_tables:
                assert len(set(table)) == len(table), f"a block twice in one table: {list(table)}"
                owners.update(table)
            counted = {block: refs for block, refs in enumerate(self._refs) if refs > 0}
            assert dict(owners) == counted, f"owners by table {dict(owners)}, by reference count {counted}"

    def _drop_hash(self, block: int) -> None:
        block_hash = self._hashes[block]
        assert block_hash is not None, f"block {block} has no hash"
        self._hashes[block] = None
        del self._index[block_hash]
        self._publish(BlockEventKind.REMOVED, block_hash)

    def _publish(self, kind: BlockEventKind, block_hash: BlockHash) -> None:
        if self._changes and self._changes[-1][0] is kind:
            self._changes[-1][1].append(block_hash)
        else:
            self._changes.append((kind, [block_hash]))
