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
class _PullCell:
    seconds: HistogramCell = field(default_factory=lambda: HistogramCell(TRANSFER_S))
    num_blocks: int = 0
    num_failed: int = 0


class PullMeter:
    """Of one engine; used by its thread."""

    def __init__(self) -> None:
        self._cells: dict[tuple[str, str], _PullCell] = {}

    def observe(
        self, source: GroupId, transport: str, *, num_blocks: int, seconds: float, has_failed: bool
    ) -> None:
        """A pull has ended."""
        cell = self._cells.setdefault((_role_of(source), transport or _NONE), _PullCell())
        if has_failed:
            cell.num_failed += 1
        else:
            cell.seconds.observe(seconds)
            cell.num_blocks += num_blocks

    def counts(self) -> tuple[PullCounts, ...]:
        """So far, by role and transport."""
        return tuple(
            PullCounts(
                from_role=role,
                transport=transport,
                seconds=cell.seconds.counts_now(),
                num_blocks=cell.num_blocks,
                num_failed=cell.num_failed,
            )
            for (role, transport), cell in sorted(self._cells.items())
        )


def _role_of(group: GroupId) -> str:
    """The pool of a group is named by its role."""
    pool = pool_of(group)
    return pool if pool in {role.value for role in Role} else _OTHER
