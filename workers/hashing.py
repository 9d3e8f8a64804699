"""Chained block hashes, computed alike by router and engine.

A sequence is cut into full blocks of `block_size` tokens. The hash of a block covers every token up to its
end: it is the digest of (hash of the block before, tokens of this block). The tenant's salt enters the
first block, so equal prompts of two tenants share nothing and timing reveals nothing between them.

Digest: BLAKE2b, 16 bytes, token ids as little-endian uint32. Salts are hashed under another personalization
than blocks: no salt, whoever chose it, can be made to stand for the inside of another tenant's chain.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import NewType

BlockHash = NewType("BlockHash", bytes)

HASH_BYTES = 16
_SALT = b"tandem salt"  # personalization


def root_hash(salt: str) -> BlockHash:
    """What stands in for the block before the first one."""
    raw = salt.encode("utf-8", "surrogatepass")
    return BlockHash(blake2b(raw, digest_size=HASH_BYTES, person=_SALT).digest())


def chain_hash(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """Hash of one full block, given the hash of the block before it."""
    return _digest(parent, _pack(token_ids))


def block_hashes(token_ids: Sequence[int], block_size: int, salt: str = "") -> list[BlockHash]:
    """Hashes of all full blocks of a token sequence, in order."""
    parent = root_hash(salt)
    hashes = []
    num_blocks = len(token_ids) // block_size
    packed = _pack(token_ids[: num_blocks * block_size])
    num_bytes = len(packed) // num_blocks if num_blocks else 0
    for number in range(num_blocks):
        parent = _digest(parent, packed[number * num_bytes : (number + 1) * num_bytes])
        hashes.append(parent)
    return hashes


def _digest(parent: BlockHash, packed: bytes) -> BlockHash:
    return BlockHash(blake2b(parent + packed, digest_size=HASH_BYTES).digest())


def _pack(token_ids: Sequence[int]) -> bytes:
    packed = array("I", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()
