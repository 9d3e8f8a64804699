"""What a group has read from each of the others: counted where reads begin and end, told with its stats."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from workers.engine.fetch import FetchEnd
from workers.types import GroupId, SourceReads

MAX_SOURCES: Final = 32  # the ones read from last

_NOT_WANTED: Final = (FetchEnd.DROPPED, FetchEnd.NO_MEMORY)  # through no fault of the source


@dataclass(slots=True)
class _Source:
    transport: str = ""
    num_open: int = 0
    num_done: int = 0
    num_failed: int = 0
    num_blocks: int = 0
    seconds: float = 0.0


class ReadCounts:
    """By source. Used by the engine's thread."""

    def __init__(self) -> None:
        self._sources: OrderedDict[GroupId, _Source] = OrderedDict()
        self._listed: tuple[SourceReads, ...] | None = ()  # None: something has changed since

    def begun(self, group_id: GroupId) -> None:
        """A read is asked for."""
        source = self._sources.setdefault(group_id, _Source())
        self._sources.move_to_end(group_id)
        source.num_open += 1
        if len(self._sources) > MAX_SOURCES:
            self._sources.popitem(last=False)
        self._listed = None

    def arrived(self, group_id: GroupId, num_blocks: int, transport: str, seconds: float) -> None:
        """Blocks have come whole, also of a read that has ended before."""
        if (source := self._sources.get(group_id)) is not None:
            source.transport = transport
            source.num_blocks += num_blocks
            source.seconds += seconds
            self._listed = None

    def ended(self, group_id: GroupId, end: FetchEnd) -> None:
        """The read is over."""
        if (source := self._sources.get(group_id)) is not None:
            source.num_open = max(0, source.num_open - 1)  # it may have been forgotten in between
            source.num_done += end is FetchEnd.DONE
            source.num_failed += end is not FetchEnd.DONE and end not in _NOT_WANTED
            self._listed = None

    def by_source(self) -> tuple[SourceReads, ...]:
        """All sources, those last that were read from last. The same object until something changes: it is
        asked for with every step."""
        if self._listed is None:
            self._listed = tuple(
                SourceReads(
                    group_id=group_id,
                    transport=source.transport,
                    num_open=source.num_open,
                    num_done=source.num_done,
                    num_failed=source.num_failed,
                    num_blocks=source.num_blocks,
                    seconds=source.seconds,
                )
                for group_id, source in self._sources.items()
            )
        return self._listed
