"""The random numbers of sampling: a counter hash, no state.

Philox 4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011). The
number for a token depends on (seed, position, choice) only, so a request gives the same tokens in any batch,
after preemption, and when another group takes it over in the middle.
"""

from __future__ import annotations

_WORD = 0xFFFFFFFF
_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10

Words = tuple[int, int, int, int]


def philox_4x32(counter: Words, key: tuple[int, int]) -> Words:
    """Four random 32-bit words for a counter of four words under a key of two."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product_0, product_1 = _MULTIPLIER_0 * c0, _MULTIPLIER_1 * c2
        c0, c1 = (product_1 >> 32) ^ c1 ^ k0, product_1 & _WORD
        c2, c3 = (product_0 >> 32) ^ c3 ^ k1, product_0 & _WORD
        k0, k1 = (k0 + _WEYL_0) & _WORD, (k1 + _WEYL_1) & _WORD
    return c0, c1, c2, c3


def uniform(seed: int, position: int, choice: int) -> float:
    """A number in [0, 1) with 53 random bits for the token at `position` of a choice. seed: int64."""
    words = philox_4x32((position & _WORD, choice & _WORD, 0, 0), (seed & _WORD, (seed >> 32) & _WORD))
    return ((words[0] >> 5) * (1 << 26) + (words[1] >> 6)) * 2.0**-53
