"""Pulls of KV blocks by where they came from and how: counted as they end."""

from __future__ import annotations

from dataclasses import dataclass, field

from workers.group_start import pool_of
from workers.histogram import HistogramCell
from workers.report import TRANSFER_S, PullCounts
from workers.types import GroupId, Role

_OTHER = "other"
_NONE = "none"


@dataclass(slots=True)
class _Way:
    seconds: HistogramCell = field(default_factory=lambda: HistogramCell(TRANSFER_S))
    num_blocks: int = 0
    num_failed: int = 0


class PullMeter:
    """Of one engine; used by its thread."""

    def __init__(self) -> None:
        self._ways: dict[tuple[str, str], _Way] = {}

    def observe(
        self, source: GroupId, transport: str, *, num_blocks: int, seconds: float, has_failed: bool
    ) -> None:
        """A pull has ended."""
        way = self._ways.setdefault((_role_of(source), transport or _NONE), _Way())
        if has_failed:
            way.num_failed += 1
        else:
            way.seconds.observe(seconds)
            way.num_blocks += num_blocks

    def counts(self) -> tuple[PullCounts, ...]:
        """So far, by role and transport."""
        return tuple(
            PullCounts(
                from_role=role,
                transport=transport,
                seconds=way.seconds.counts_now(),
                num_blocks=way.num_blocks,
                num_failed=way.num_failed,
            )
            for (role, transport), way in sorted(self._ways.items())
        )


def _role_of(group: GroupId) -> str:
    """The pool of a group is named by its role."""
    pool = pool_of(group)
    return pool if pool in {role.value for role in Role} else _OTHER
