"""What groups say of themselves, as metrics: one table, and totals that go on over starts of a group."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from router.dispatch.interface import GroupState
from router.telemetry.metric_spec import MetricSpec
from router.telemetry.snapshot import GroupCounts, Series
from workers.directory.snapshots import RETAIN_S
from workers.types import GroupStats

_Name = tuple[str, str]  # of a metric, and the value of its own label


@dataclass(frozen=True, slots=True)
class GroupMetric:
    """A series of a group, and how its value is read."""

    spec: MetricSpec
    value: Callable[[GroupStats], float]
    label: str = ""


UP = MetricSpec("engine_up", "1 when the group answers with tokens")
EPOCH = MetricSpec("engine_epoch", "Starts of the group's ranks")
KV_BLOCKS = MetricSpec("kv_blocks", "Blocks of the KV pool", ("state",))
RUNNING = MetricSpec("engine_running", "Requests in the engine with blocks")
WAITING = MetricSpec("engine_waiting", "Requests in the engine's queue")
KV_TRANSFERRING = MetricSpec("kv_transferring_blocks", "Active blocks that a read is writing now")
KV_LEASES = MetricSpec("kv_leases", "Readers of the group's blocks now")
KV_FAILURES = MetricSpec("kv_fetch_failures", "Reads that brought less than was asked for", ("reason",))
STEP_MEAN = MetricSpec("engine_step_mean_seconds", "Moving mean of a step's duration")
GROUP_GAUGES = (
    GroupMetric(KV_BLOCKS, lambda stats: stats.free_blocks, "free"),
    GroupMetric(KV_BLOCKS, lambda stats: stats.cached_blocks, "cached"),
    GroupMetric(KV_BLOCKS, lambda stats: stats.active_blocks, "active"),
    GroupMetric(RUNNING, lambda stats: stats.num_running),
    GroupMetric(WAITING, lambda stats: stats.num_waiting),
    GroupMetric(STEP_MEAN, lambda stats: stats.step_seconds),
    GroupMetric(KV_TRANSFERRING, lambda stats: stats.kv_transferring_blocks),
    GroupMetric(KV_LEASES, lambda stats: stats.kv_leases),
)


def _total(name: str, help: str, value: Callable[[GroupStats], float]) -> GroupMetric:
    return GroupMetric(MetricSpec(name, help), value)


GROUP_TOTALS = (
    _total(
        "engine_prompt_tokens",
        "Prompt tokens of requests the engine admitted",
        lambda stats: stats.prompt_tokens_total,
    ),
    _total(
        "engine_cached_tokens",
        "Of those, found in its prefix cache",
        lambda stats: stats.cached_tokens_total,
    ),
    _total(
        "engine_generated_tokens", "Tokens the engine sampled", lambda stats: stats.generated_tokens_total
    ),
    _total(
        "engine_preemptions", "Sequences put back for want of blocks", lambda stats: stats.preemptions_total
    ),
    _total(
        "engine_finished_stop",
        "Requests the engine ended at an end id",
        lambda stats: stats.finished_stop_total,
    ),
    _total(
        "engine_finished_length",
        "Requests the engine ended at a length",
        lambda stats: stats.finished_length_total,
    ),
    _total(
        "engine_finished_error",
        "Requests the engine ended with an error",
        lambda stats: stats.finished_error_total,
    ),
    _total("engine_cancelled", "Requests the engine was told to drop", lambda stats: stats.cancelled_total),
    _total("engine_steps", "Steps run", lambda stats: stats.num_steps),
    _total(
        "kv_fetches", "Reads of other groups' blocks that were begun", lambda stats: stats.kv_fetches_total
    ),
    _total(
        "kv_fetched_tokens",
        "Prompt tokens of blocks that arrived whole from other groups",
        lambda stats: stats.kv_fetched_tokens_total,
    ),
    GroupMetric(KV_FAILURES, lambda stats: stats.kv_fetches_incomplete_total, "incomplete"),
    GroupMetric(KV_FAILURES, lambda stats: stats.kv_fetches_lost_total, "lost"),
    GroupMetric(KV_FAILURES, lambda stats: stats.kv_fetches_stalled_total, "stalled"),
    GroupMetric(KV_FAILURES, lambda stats: stats.kv_fetches_void_total, "void"),
    GroupMetric(KV_FAILURES, lambda stats: stats.kv_fetches_no_memory_total, "no_memory"),
    _total(
        "kv_leases_expired",
        "Readers of the group's blocks that were not heard of any more",
        lambda stats: stats.kv_leases_expired_total,
    ),
)


def group_counts(group: str, state: GroupState | None, totals: list[Series]) -> GroupCounts:
    """What a router knows of a group."""
    if state is None:  # it has left; what it did stays for a while
        return GroupCounts(group=group, epoch=0, num_steps=0, is_connected=False, gauges=[], totals=totals)
    return GroupCounts(
        group=group,
        epoch=state.epoch,
        num_steps=state.stats.num_steps,
        is_connected=state.info is not None,
        gauges=[
            (UP.name, "", 1 if state.is_ready else 0),
            (EPOCH.name, "", state.epoch),
            *((row.spec.name, row.label, row.value(state.stats)) for row in GROUP_GAUGES),
        ],
        totals=totals,
    )


class CarriedTotals:
    """Totals of groups that go on over epochs: what earlier epochs reached, plus the present one.

    Within an epoch the highest value counts: a group without a connection shows zeros. A group that has left
    is forgotten after RETAIN_S.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seen_at: dict[str, float] = {}
        self._epoch: dict[str, int] = {}
        self._before: dict[str, dict[_Name, float]] = {}  # group -> metric -> sum over earlier epochs
        self._now: dict[str, dict[_Name, float]] = {}

    def update(self, states: Iterable[GroupState]) -> None:
        """Takes the stats of the groups there are now."""
        now = self._clock()
        for state in states:
            group, epoch = str(state.group_id), state.epoch
            known = self._epoch.get(group, epoch)
            self._seen_at[group] = now
            if epoch < known:  # a late word
                continue
            self._epoch[group] = epoch
            before, reached = self._before.setdefault(group, {}), self._now.setdefault(group, {})
            for row in GROUP_TOTALS:
                name, value = (row.spec.name, row.label), row.value(state.stats)
                if epoch > known:
                    before[name] = before.get(name, 0) + reached.get(name, 0)
                    reached[name] = value
                reached[name] = max(value, reached.get(name, 0))
        for group in [group for group, seen_at in self._seen_at.items() if now - seen_at >= RETAIN_S]:
            for table in (self._seen_at, self._epoch, self._before, self._now):
                del table[group]

    def groups(self) -> list[str]:
        """Groups seen of late, by id."""
        return sorted(self._seen_at)

    def of(self, group: str) -> list[Series]:
        """The totals of a group."""
        before = self._before[group]
        return [(*name, before.get(name, 0) + now) for name, now in self._now[group].items()]
