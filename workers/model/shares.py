"""How the heads, columns and rows of a model are handed out to the ranks of a group. No torch here."""

from __future__ import annotations

from math import lcm

MOST_EQUAL_RANKS = 8  # groups of up to so many ranks add up in one order, so have the same bits
_MOST_LEAVES = 24  # divides well by 2, 3, 4, 6 and 8
_GRAINS = (32, 16, 8, 4, 2)  # the first: inputs that tiles and groups of quantized weights hold


def share(total: int, rank: int, size: int) -> range:
    """The part of 0 .. total - 1 that a rank holds: first parts are larger by at most one."""
    base, extra = divmod(total, size)
    start = rank * base + min(rank, extra)
    return range(start, start + base + (rank < extra))


def expert_cuts(count: int) -> tuple[int, ...]:
    """Where the leaves of `count` experts begin and end, the same for every number of ranks up to
    MOST_EQUAL_RANKS: ranks have whole ones."""
    leaves = min(count, _MOST_LEAVES)
    return tuple(count * leaf // leaves for leaf in range(leaves + 1))


def kv_heads_of_rank(num_kv_heads: int, rank: int, tensor_parallel: int) -> range:
    """KV heads that a rank holds: an even share, or one copy when ranks outnumber the heads."""
    if tensor_parallel <= num_kv_heads:
        return share(num_kv_heads, rank, tensor_parallel)
    head = rank * num_kv_heads // tensor_parallel
    return range(head, head + 1)


def head_splits(num_heads: int, num_kv_heads: int) -> list[int]:
    """Numbers of ranks that heads can be handed out to, ascending.

    Up to the number of KV heads any: ranks hold whole KV heads with their query heads, some one more than
    others. Beyond it KV heads are copied, so it must be a multiple of their number and divide the query
    heads.
    """
    copied = range(2 * num_kv_heads, num_heads + 1, num_kv_heads)
    return [*range(1, num_kv_heads + 1), *(size for size in copied if num_heads % size == 0)]


def queries_per_leaf(num_heads: int, num_kv_heads: int) -> int:
    """The most neighbouring query heads that every group of up to MOST_EQUAL_RANKS ranks has on one rank."""
    sizes = [size for size in head_splits(num_heads, num_kv_heads) if size <= MOST_EQUAL_RANKS]
    pieces = lcm(*(size // num_kv_heads for size in sizes if size > num_kv_heads))
    return num_heads // num_kv_heads // pieces


def inner_leaves(num_columns: int, num_heads: int, num_kv_heads: int) -> tuple[int, ...]:
    """Widths of the parts in which those ranks hold columns of an MLP, the same for every number of ranks.

    Few, so that sums are seldom joined, and so many that ranks have equal shares, nearly so where many sizes
    of groups are possible. Of whole grains; the first parts are wider by at most one.
    """
    sizes = [size for size in head_splits(num_heads, num_kv_heads) if size <= MOST_EQUAL_RANKS]
    wanted = min(lcm(*sizes), _MOST_LEAVES)
    grain = _grain(num_columns, wanted)
    num_grains = -(-num_columns // grain)  # the last one of an odd number of columns is half
    count = min(wanted, num_grains)
    shares = [share(num_grains, leaf, count) for leaf in range(count)]
    return tuple(min(part.stop * grain, num_columns) - part.start * grain for part in shares)


def _grain(num_columns: int, num_leaves: int) -> int:
    """The coarsest that divides the columns, where the parts are of many; else one that makes them equal."""
    dividing = [g for g in _GRAINS if num_columns % g == 0 and num_columns >= g * num_leaves]
    if dividing and num_columns >= 4 * _GRAINS[0] * num_leaves:
        return dividing[0]
    equal = [grain for grain in dividing if num_columns // grain % num_leaves == 0]
    return [*equal, *dividing, _GRAINS[-1]][0]
