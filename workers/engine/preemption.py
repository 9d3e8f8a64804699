"""Who gives its blocks back when the pool is full: the one that loses the least work by it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Tokens
from itertools import chain

from workers.engine.block_pool import BlockPool
from workers.engine.sequence import Sequence


def choose_victim(asking: Sequence, running: Tokens[Sequence], pool: BlockPool, block_size: int) -> Sequence:
    """The sequence to preempt so that `asking` can have a block; may be `asking` itself.

    Never the first in the order of service, which is what guarantees progress, and never one more urgent than
    `asking`. Of the rest: the least urgent priority, then one whose blocks are not all shared (preempting
    that one frees nothing), then the least lost work, then the latest arrival.
    """
    first = min(running, key=lambda sequence: sequence.key)
    candidates = [s for s in running if s is not first and s.key[0] >= asking.key[0]]
    assert candidates, f"{asking.key} runs alone and the pool of {pool.num_blocks} blocks is too small for it"

    def cost(sequence: Sequence) -> tuple[int, bool, int, int, int]:
        lost = lost_tokens(sequence, pool, block_size)
        priority, arrival, choice = sequence.key
        return (-priority, lost == 0, lost, -arrival, -choice)

    return min(candidates, key=cost)


def lost_tokens(sequence: Sequence, pool: BlockPool, block_size: int) -> int:
    """Computed tokens that have to be computed again if the sequence is preempted now.

    Blocks that others hold too stay. Its own stay findable for a while, but memory is short: they are what is
    evicted next, from the end of the chain. Shared blocks are at the beginning of a table, so the walk from
    the end stops at the first of them.
    """
    if sequence.search is not None:
        # All of them go together, so what they share among themselves counts, once.
        counts = Counter(chain(sequence.block_table, *sequence.search.tables))
        return block_size * sum(pool.num_owners(block) == count for block, count in counts.items())
    num_own, held = 0, sequence.held_blocks
    for block in reversed(held):
        if pool.num_owners(block) > 1:
            break
        num_own += 1
    num_shared = len(held) - num_own
    if num_own == 0:
        return 0
    # Blocks reserved for this step hold nothing yet: giving those back costs least, but is no longer free.
    return max(1, sequence.num_computed - num_shared * block_size)
