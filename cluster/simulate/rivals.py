"""Placement policies of other routers, to compare ours with. They know what ours knows and no more: what this
router has sent and not seen end, and the same prefix index.

    power_of_two    two groups drawn at random, the one with fewer unfinished requests
    longest_prefix  the group that has most of the prompt, when that is more than 30 % of it; else the one
                    with the fewest unfinished requests, as always when load is too uneven (the rule and the
                    thresholds of SGLang's cache-aware router)

Round robin is a setting of our own policy.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Protocol

from router.routing.policy import GroupLoad
from workers.types import GroupId

_MATCH_THRESHOLD = 0.3  # share of the prompt
_UNEVEN_BY = 64  # requests between the most and the least loaded group ...
_UNEVEN_RATIO = 1.5  # ... and their ratio


class Rival(Protocol):
    """Chooses a group."""

    def choose(
        self, prompt_tokens: int, loads: Sequence[GroupLoad], matches: Mapping[GroupId, int]
    ) -> GroupId:
        """`matches`: leading blocks of the prompt that a group has cached."""
        ...


class PowerOfTwo:
    """Mitzenmacher, 2001."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def choose(
        self, prompt_tokens: int, loads: Sequence[GroupLoad], matches: Mapping[GroupId, int]
    ) -> GroupId:
        """The less loaded of two."""
        drawn = self._random.sample(loads, min(2, len(loads)))
        return min(drawn, key=lambda load: load.own_requests).group_id


class LongestPrefix:
    """Cache first, load when the cache says nothing or load is uneven."""

    def choose(
        self, prompt_tokens: int, loads: Sequence[GroupLoad], matches: Mapping[GroupId, int]
    ) -> GroupId:
        """See the module."""
        least = min(loads, key=lambda load: load.own_requests)
        most = max(load.own_requests for load in loads)
        is_uneven = most - least.own_requests > _UNEVEN_BY and most > _UNEVEN_RATIO * least.own_requests
        longest = max(
            loads, key=lambda load: (matches.get(load.group_id, 0) * load.block_size, -load.own_requests)
        )
        matched = matches.get(longest.group_id, 0) * longest.block_size
        if is_uneven or matched <= _MATCH_THRESHOLD * prompt_tokens:
            return least.group_id
        return longest.group_id
