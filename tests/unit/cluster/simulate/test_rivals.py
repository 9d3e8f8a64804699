from __future__ import annotations

from collections import Counter

from cluster.simulate.rivals import LongestPrefix, PowerOfTwo
from router.routing.policy import GroupLoad
from workers.types import GroupId

A, B, C = GroupId("a"), GroupId("b"), GroupId("c")


def loads(*requests: int) -> list[GroupLoad]:
    return [
        GroupLoad(group_id=group_id, block_size=16, own_requests=count)
        for group_id, count in zip((A, B, C), requests, strict=True)
    ]


def test_power_of_two_takes_the_less_loaded_of_a_random_pair() -> None:
    rival = PowerOfTwo(seed=1)
    chosen = Counter(rival.choose(100, loads(5, 0, 9), {}) for _ in range(300))
    assert chosen[C] == 0  # one of the others is always in the pair
    assert 170 <= chosen[B] <= 230  # in two of three pairs
    assert PowerOfTwo(seed=1).choose(1, loads(1, 1, 1)[:1], {}) == A


def test_longest_prefix_is_followed_above_a_share_of_the_prompt() -> None:
    rival = LongestPrefix()
    assert rival.choose(160, loads(4, 0, 1), {A: 5, B: 0, C: 4}) == A
    assert rival.choose(160, loads(4, 0, 1), {A: 5, B: 0, C: 5}) == C  # of equal ones the less loaded
    assert rival.choose(160, loads(4, 0, 1), {A: 3}) == B  # 30 % is too little
    assert rival.choose(160, loads(70, 5, 0), {A: 10}) == C  # load is too uneven
    assert rival.choose(160, loads(64, 5, 0), {A: 10}) == A
