"""What a group tells of its reads."""

from __future__ import annotations

from workers.engine.fetch import FetchEnd
from workers.engine.reads import MAX_SOURCES, ReadCounts
from workers.types import GroupId, SourceReads


def test_sources_read_from_long_ago_are_forgotten() -> None:
    counts = ReadCounts()
    for number in range(MAX_SOURCES):
        counts.begun(GroupId(f"g{number}"))
    counts.begun(GroupId("g0"))
    counts.begun(GroupId("new"))
    told = counts.by_source()
    assert [reads.group_id for reads in told] == [*(f"g{i}" for i in range(2, MAX_SOURCES)), "g0", "new"]
    for name in ("g1", "g0", "g0", "g0"):
        counts.ended(GroupId(name), FetchEnd.LOST)
    counts.arrived(GroupId("g1"), 4, "memory", 1.0)
    assert counts.by_source()[-2] == SourceReads(group_id=GroupId("g0"), num_failed=3)
