"""How a KV block lies in memory, whether two groups' blocks fit each other, and which bytes a rank reads.

A block of one rank has a page for every (KV head of the rank, layer, K or V), as
`workers.kernels.paged_cache` says: heads are outermost, so what one rank wants of another one's block is a
contiguous run of whole heads, whatever the two group sizes are.
Nothing here touches memory.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Final, NamedTuple

from workers.kv_format import NUMBER_BYTES, row_bytes
from workers.model.shares import kv_heads_of_rank

LAYOUT_VERSION: Final = 1  # of the order of dimensions in a block
_DTYPES: Final = ("float32", "bfloat16")
# A layout comes from another process: what is far beyond any model is refused before it sizes anything.
_LIMITS: Final = {
    "block_size": 4096,
    "tensor_parallel": 1024,
    "num_kv_heads": 4096,
    "num_layers": 4096,
    "head_dim": 65536,
}
_MAX_TEXT: Final = 200


class IncompatibleLayouts(Exception):
    """Blocks of one group mean nothing to the other. The message has both values of all that differs."""


class Piece(NamedTuple):
    """A contiguous run of bytes that one rank reads out of every block of another rank."""

    peer_rank: int
    peer_offset: int  # bytes from the start of the peer's block
    own_offset: int  # bytes from the start of the own block
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """What decides the bytes of a block. Only the size of the group may differ between reader and source."""

    model_hash: str  # of checkpoint and weight format: another one has other keys and values
    code: str  # digest of the engine's source: another one may round differently
    dtype: str  # of the model, which decides how keys and values are rounded before they are stored
    kv_dtype: str  # in which they are stored
    block_size: int  # tokens
    num_kv_heads: int  # of the model, not of a rank
    num_layers: int
    head_dim: int
    tensor_parallel: int
    version: int = LAYOUT_VERSION

    def __post_init__(self) -> None:
        """Raises ValueError for what no model has."""
        for name, limit in _LIMITS.items():
            value = getattr(self, name)
            if not 1 <= value <= limit:
                raise ValueError(f"KV layout: {name} {value} is not between 1 and {limit}")
        for name, dtype, known in (("dtype", self.dtype, _DTYPES), ("kv_dtype", self.kv_dtype, NUMBER_BYTES)):
            if dtype not in known:
                raise ValueError(f"KV layout: {name} {dtype[:40]!r} is none of {', '.join(known)}")
        for text in (self.model_hash, self.code):
            if len(text) > _MAX_TEXT:
                raise ValueError(f"KV layout: a text of {len(text)} characters, the limit is {_MAX_TEXT}")

    @property
    def head_bytes(self) -> int:
        """Of one KV head over all layers in one block."""
        return self.num_layers * 2 * self.block_size * row_bytes(self.head_dim, self.kv_dtype)

    def heads_of(self, rank: int) -> range:
        """KV heads that a rank holds, by the rule that loads the weights."""
        return kv_heads_of_rank(self.num_kv_heads, rank, self.tensor_parallel)

    def block_bytes(self, rank: int) -> int:
        """Of one block in the pool of a rank."""
        return len(self.heads_of(rank)) * self.head_bytes


def check_compatible(own: KVLayout, peer: KVLayout) -> None:
    """Raises IncompatibleLayouts unless every token's keys and values are the same bytes in both groups."""
    theirs = asdict(peer)
    differences = [
        f"{name} (here {value}, there {theirs[name]})"
        for name, value in asdict(own).items()
        if name != "tensor_parallel" and value != theirs[name]
    ]
    if differences:
        raise IncompatibleLayouts(
            f"KV blocks of the two groups do not fit each other: they differ in {', '.join(differences)}; "
            "groups that exchange blocks must run the same model, configuration and version"
        )


def reads(own: KVLayout, own_rank: int, peer: KVLayout) -> list[Piece]:
    """What this rank reads of every block of the peer group, in the order of its own block.

    A head that the peer has several copies of is read from the copy that this rank's own place among the
    copies falls on, so that readers spread evenly. Assumes `check_compatible`.
    """
    pieces: list[Piece] = []
    for position, head in enumerate(own.heads_of(own_rank)):
        rank = _holder(own, own_rank, peer, head)
        piece = Piece(
            peer_rank=rank,
            peer_offset=(head - peer.heads_of(rank).start) * own.head_bytes,
            own_offset=position * own.head_bytes,
            num_bytes=own.head_bytes,
        )
        last = pieces[-1] if pieces else None
        if last is not None and last.peer_rank == rank:  # heads ascend in both blocks, so it follows
            pieces[-1] = last._replace(num_bytes=last.num_bytes + piece.num_bytes)
        else:
            pieces.append(piece)
    return pieces


def _holder(own: KVLayout, own_rank: int, peer: KVLayout, head: int) -> int:
    """The rank of the peer group that this rank reads the head from."""
    readers, holders = _ranks_with(own, head), _ranks_with(peer, head)
    return holders[readers.index(own_rank) * len(holders) // len(readers)]


def _ranks_with(layout: KVLayout, head: int) -> list[int]:
    return [rank for rank in range(layout.tensor_parallel) if head in layout.heads_of(rank)]
