"""What a router tells of groups: their levels now, and totals that go on over starts of a group."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from router.dispatch.interface import GroupState
from router.telemetry.snapshot import GroupCounts
from workers.directory.snapshots import RETAIN_S
from workers.metrics.group import GroupSight, group_levels, group_totals
from workers.metrics.spec import Series

_Name = tuple[str, str]  # of a metric, and the values of its own labels


def sight_of(state: GroupState) -> GroupSight:
    """A group as its metrics want it."""
    return GroupSight(
        role=state.role.value,
        epoch=state.epoch,
        is_ready=state.is_ready,
        info=state.info,
        stats=state.stats,
        report=state.report,
    )


class CarriedTotals:
    """Totals of groups that go on over epochs: what earlier epochs reached, plus the present one.

    Within an epoch the highest value counts: a group without a connection shows zeros. A group that has left
    is forgotten after RETAIN_S.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seen_at: dict[str, float] = {}
        self._role: dict[str, str] = {}
        self._epoch: dict[str, int] = {}
        self._before: dict[str, dict[_Name, float]] = {}  # group -> metric -> sum over earlier epochs
        self._now: dict[str, dict[_Name, float]] = {}

    def update(self, states: Iterable[GroupState]) -> None:
        """Takes what the groups there are now say."""
        now = self._clock()
        for state in states:
            group, epoch = str(state.group_id), state.epoch
            known = self._epoch.get(group, epoch)
            self._seen_at[group] = now
            if epoch < known:  # a late word
                continue
            self._epoch[group], self._role[group] = epoch, state.role.value
            before, reached = self._before.setdefault(group, {}), self._now.setdefault(group, {})
            if epoch > known:
                for ended, total in reached.items():
                    before[ended] = before.get(ended, 0) + total
                reached.clear()
            for name, label, value in group_totals(sight_of(state)):
                reached[name, label] = max(value, reached.get((name, label), value))
        for group in [group for group, seen_at in self._seen_at.items() if now - seen_at >= RETAIN_S]:
            for table in (self._seen_at, self._role, self._epoch, self._before, self._now):
                del table[group]

    def counts(self, present: Iterable[GroupState]) -> list[GroupCounts]:
        """What is known of all groups seen of late, by id."""
        states = {str(state.group_id): state for state in present}
        return [self._counts(group, states.get(group)) for group in sorted(self._seen_at)]

    def _counts(self, group: str, state: GroupState | None) -> GroupCounts:
        totals = self._of(group)
        if state is None:  # it has left; what it did stays for a while
            return GroupCounts(
                group=group,
                role=self._role[group],
                epoch=0,
                num_steps=0,
                is_connected=False,
                gauges=[],
                totals=totals,
            )
        return GroupCounts(
            group=group,
            role=state.role.value,
            epoch=state.epoch,
            num_steps=state.stats.num_steps,
            is_connected=state.info is not None,
            gauges=list(group_levels(sight_of(state))),
            totals=totals,
        )

    def _of(self, group: str) -> list[Series]:
        before, now = self._before[group], self._now[group]
        names = dict.fromkeys((*before, *now))
        return [(*name, before.get(name, 0) + now.get(name, 0)) for name in names]
