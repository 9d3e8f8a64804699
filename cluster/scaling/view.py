"""What the decision sees: plain data, as it stands at one moment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from workers.data_plane.signals import GroupSignals
from workers.types import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolView:
    """A pool now."""

    role: Role
    target: int  # groups it is to have, those that still start included
    least: int
    most: int
    reports: Sequence[GroupSignals] = ()  # of groups that run
    num_wanting: float = 0.0  # requests that wait for the first group of a pool at zero


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolMemory:
    """What the decision remembers of a pool."""

    target: int | None = None  # what it decided last
    direction: int = 0  # of the last change: 1 up, -1 down, 0 none yet
    changed_s: float = float("-inf")
    low_since_s: float | None = None  # since when fewer groups would do
    low_peak: int = 0  # the most of them that it needed since then
    busy_s: float | None = None  # when it last had work


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What one decision hands to the next."""

    pools: Mapping[str, PoolMemory] = field(default_factory=dict)
    slowness: float = 1.0  # measured over predicted length of a step
