"""Block hashes are part of the wire contract: router and engine must agree to the byte, across versions."""

import pytest

from workers.hashing import BlockHash, block_hashes, chain_hash, root_hash


def test_golden_values() -> None:
    got = [h.hex() for h in block_hashes([1, 2, 3, 4, 5, 6, 7, 8, 9], block_size=4)]
    assert got == GOLDEN
    assert [h.hex() for h in block_hashes([1, 2, 3, 4], block_size=4, salt="tenant-a")] == GOLDEN_SALTED


def test_only_full_blocks_are_hashed() -> None:
    assert [len(block_hashes(range(n), block_size=16)) for n in (0, 15, 16, 17, 32)] == [0, 0, 1, 1, 2]


def test_a_hash_covers_everything_before_it() -> None:
    one, other = block_hashes([1, 2, 3, 4, 5, 6], 2), block_hashes([9, 2, 3, 4, 5, 6], 2)
    assert not set(one) & set(other)
    assert block_hashes([1, 2, 3, 4, 7, 8], 2)[:2] == one[:2]


def test_salts_separate_tenants() -> None:
    hashes = {tuple(block_hashes(range(64), 16, salt)) for salt in ("", "a", "b", "\ud83d")}
    assert len(hashes) == 4


def test_a_salt_cannot_spell_a_block() -> None:
    """Salts come from clients: one made of a block's hash and the tokens after it is still no such block."""
    parent = BlockHash(b"a" * 16)
    assert root_hash("a" * 16 + "bbbb") != chain_hash(parent, (0x62626262,))


def test_chain_is_the_sum_of_its_links() -> None:
    first = chain_hash(root_hash("s"), (1, 2))
    assert block_hashes((1, 2, 3, 4), 2, "s") == [first, chain_hash(first, (3, 4))]


@pytest.mark.parametrize("bad", [[-1, 0], [2**32, 0]])
def test_ids_beyond_32_bits_are_refused(bad: list[int]) -> None:
    with pytest.raises(OverflowError):
        block_hashes(bad, 2)


GOLDEN = [
    "8447c158de5e62353346392b00369387",
    "acfb44946e5c8480093ec7b914c92ee0",
]
GOLDEN_SALTED = ["8ba7da24fa73c2908de26639830d5313"]
