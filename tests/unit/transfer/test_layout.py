from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.transfer.layouts import layout, numbered_block, part_of
from workers.model.spec import spec_from_config
from workers.transfer.layout import IncompatibleLayouts, KVLayout, Piece, check_compatible, reads


def read_rank(own: KVLayout, rank: int, peer: KVLayout) -> np.ndarray:
    """A block of this rank put together from the peer's blocks, byte by byte."""
    whole = numbered_block(own)
    found = np.full_like(part_of(whole, own, rank), -1)
    own_bytes = found.reshape(-1).view(np.uint8)
    assert own_bytes.nbytes == own.block_bytes(rank)
    for piece in reads(own, rank, peer):
        theirs = part_of(whole, peer, piece.peer_rank).reshape(-1).view(np.uint8)
        assert theirs.nbytes == peer.block_bytes(piece.peer_rank)
        source = theirs[piece.peer_offset : piece.peer_offset + piece.num_bytes]
        assert source.nbytes == piece.num_bytes
        own_bytes[piece.own_offset : piece.own_offset + piece.num_bytes] = source
    return found


@settings(deadline=None)
@given(
    heads=st.integers(1, 9),
    sizes=st.tuples(st.integers(1, 18), st.integers(1, 18)),
)
def test_every_rank_gets_what_it_would_have_computed(heads: int, sizes: tuple[int, int]) -> None:
    own, peer = (layout(num_kv_heads=heads, tensor_parallel=size) for size in sizes)
    for rank in range(own.tensor_parallel):
        expected = part_of(numbered_block(own), own, rank)
        assert np.array_equal(read_rank(own, rank, peer), expected)


@pytest.mark.parametrize(("heads", "size"), [(3, 1), (3, 2), (3, 3), (3, 9), (8, 4), (2, 8), (1, 6)])
def test_equal_groups_read_whole_blocks_rank_from_rank(heads: int, size: int) -> None:
    own = layout(num_kv_heads=heads, tensor_parallel=size)
    for rank in range(size):
        assert reads(own, rank, own) == [Piece(rank, 0, 0, own.block_bytes(rank))]


def test_uneven_heads_of_smollm2() -> None:
    alone, two, three = (layout(tensor_parallel=size) for size in (1, 2, 3))
    head = alone.head_bytes
    assert [two.heads_of(rank) for rank in range(2)] == [range(2), range(2, 3)]
    assert reads(two, 0, alone) == [Piece(0, 0, 0, 2 * head)]
    assert reads(two, 1, alone) == [Piece(0, 2 * head, 0, head)]
    assert reads(alone, 0, two) == [Piece(0, 0, 0, 2 * head), Piece(1, 0, 2 * head, head)]
    assert reads(two, 0, three) == [Piece(0, 0, 0, head), Piece(1, 0, head, head)]
    assert reads(three, 1, two) == [Piece(0, head, 0, head)]


def test_copies_of_a_head_share_the_readers() -> None:
    copied = layout(num_kv_heads=2, tensor_parallel=8)
    wide = layout(num_kv_heads=2, tensor_parallel=4)
    by_source = Counter(reads(copied, rank, wide)[0].peer_rank for rank in range(8))
    assert by_source == {0: 2, 1: 2, 2: 2, 3: 2}
    assert [reads(wide, rank, copied)[0].peer_rank for rank in range(4)] == [0, 2, 4, 6]


@pytest.mark.parametrize("size", [1, 2, 3, 9])
def test_heads_are_those_of_the_weights(size: int) -> None:
    spec = spec_from_config(
        {
            "model_type": "llama",
            "vocab_size": 128,
            "hidden_size": 72,
            "num_hidden_layers": 2,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "intermediate_size": 96,
            "max_position_embeddings": 256,
        }
    )
    of = layout(num_kv_heads=3, tensor_parallel=size)
    for rank in range(size):
        assert of.heads_of(rank) == spec.kv_heads_of_rank(rank, size)


def test_bytes_of_smollm2() -> None:
    own = layout(num_layers=30, block_size=16, head_dim=64, dtype="bfloat16", tensor_parallel=2)
    assert own.head_bytes == 122_880
    assert [own.block_bytes(rank) for rank in range(2)] == [245_760, 122_880]


def test_only_the_group_size_may_differ() -> None:
    own = layout(dtype="bfloat16")
    check_compatible(own, replace(own, tensor_parallel=3))
    with pytest.raises(IncompatibleLayouts) as caught:
        check_compatible(own, replace(own, dtype="float32", kv_dtype="int8", block_size=32))
    assert str(caught.value) == (
        "KV blocks of the two groups do not fit each other: they differ in dtype (here bfloat16, there "
        "float32), kv_dtype (here bfloat16, there int8), block_size (here 4, there 32); groups that exchange "
        "blocks must run the same model, configuration and version"
    )


@pytest.mark.parametrize(
    "changed",
    [{"model_hash": "other"}, {"code": "other"}, {"num_layers": 3}, {"head_dim": 4}, {"version": 2}],
)
def test_any_other_difference_is_refused_by_name(changed: dict[str, str | int]) -> None:
    own = layout()
    (name, value) = next(iter(changed.items()))
    with pytest.raises(IncompatibleLayouts, match=rf"{name} \(here {getattr(own, name)}, there {value}\)"):
        check_compatible(own, replace(own, **changed))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tensor_parallel": 10**9}, "tensor_parallel 1000000000 is not between 1 and 1024"),
        ({"tensor_parallel": 0}, "tensor_parallel 0 is not between 1 and 1024"),
        ({"num_layers": -1}, "num_layers -1 is not between 1 and 4096"),
        ({"dtype": "int8"}, "dtype 'int8' is none of float32, bfloat16"),
        ({"kv_dtype": "int4"}, "kv_dtype 'int4' is none of float32, bfloat16, int8"),
        ({"model_hash": "x" * 201}, "a text of 201 characters, the limit is 200"),
    ],
)
def test_what_no_model_has_is_refused(changed: dict[str, str | int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(layout(), **changed)


def test_int8_heads_have_their_scales_with_them() -> None:
    own = layout(dtype="bfloat16", kv_dtype="int8")
    assert own.head_bytes == 2 * 2 * 4 * (2 + 2)  # layers, K and V, tokens, codes and a scale
    assert reads(own, 0, replace(own, tensor_parallel=3)) == [
        Piece(peer_rank=rank, peer_offset=0, own_offset=rank * 64, num_bytes=64) for rank in range(3)
    ]
