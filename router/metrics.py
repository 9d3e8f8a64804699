"""Metrics of a router replica: one table, and the cells of one replica.

What the client saw is counted here (requests by reason, tokens delivered, times); what the groups say of
themselves is read from their stats. Counters add up: requests_total over its reasons is every request that
was admitted, and the token counters equal the sum of the `usage` of all answers plus the tokens of the
aborted ones. `router.telemetry` brings the cells of all replicas together, `router.exposition` writes them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from router.admission import Admission
from router.dispatch import GroupState
from router.snapshot import GroupCounts, HistogramCounts, RouterSnapshot, Series
from workers.snapshots import RETAIN_S
from workers.types import GroupStats

PREFIX = "tandem_"

_QUEUE_S = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0),
)
_WHOLE_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
_TOKEN_S = (
    *(0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0),
)


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One row of the table. Labels `model` and `replica` (of a group: `group`) come first on every series."""

    name: str  # without prefix, and without _total
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()  # seconds, of histograms


REQUESTS = MetricSpec("requests", "Admitted requests that ended, by reason", ("reason",))
CLIENT_ERRORS = MetricSpec("client_errors", "Requests refused as the client's mistake (4xx)", ("code",))
SERVER_ERRORS = MetricSpec("server_errors", "Requests refused or failed for our reasons (5xx)", ("code",))
PROMPT_TOKENS = MetricSpec("prompt_tokens", "Prompt tokens of admitted requests, as in usage")
CACHED_TOKENS = MetricSpec("cached_prompt_tokens", "Of those, found in a prefix cache")
GENERATION_TOKENS = MetricSpec("generation_tokens", "Tokens delivered, as in usage")
DISCONNECTS = MetricSpec("client_disconnects", "Clients that left before their answer was complete")
TTFT = MetricSpec("ttft_seconds", "From the request's arrival to its first token", (), _QUEUE_S)
E2E = MetricSpec("e2e_seconds", "From the request's arrival to its end", (), _WHOLE_S)
ITL = MetricSpec("itl_seconds", "Gap between tokens of a choice, as they reach the router", (), _TOKEN_S)
TELEMETRY_FAILURES = MetricSpec(
    "telemetry_failures", "Times these counts could not be exchanged with the other replicas"
)
COUNTERS = (
    REQUESTS,
    CLIENT_ERRORS,
    SERVER_ERRORS,
    PROMPT_TOKENS,
    CACHED_TOKENS,
    GENERATION_TOKENS,
    DISCONNECTS,
    TELEMETRY_FAILURES,
)
HISTOGRAMS = (TTFT, E2E, ITL)
INFLIGHT = MetricSpec("requests_inflight", "Admitted requests that have not ended")
QUEUED = MetricSpec("queue_requests", "Admitted requests without a token yet")
QUEUED_TOKENS = MetricSpec("queue_tokens", "Prompt tokens of those")
GAUGES = (INFLIGHT, QUEUED, QUEUED_TOKENS)
TELEMETRY_AGE = MetricSpec("telemetry_age_seconds", "Age of the replica's counts in this answer")
REASONS = ("stop", "length", "aborted", "error")


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
STEP_MEAN = MetricSpec("engine_step_mean_seconds", "Moving mean of a step's duration")
GROUP_GAUGES = (
    GroupMetric(KV_BLOCKS, lambda stats: stats.free_blocks, "free"),
    GroupMetric(KV_BLOCKS, lambda stats: stats.cached_blocks, "cached"),
    GroupMetric(KV_BLOCKS, lambda stats: stats.active_blocks, "active"),
    GroupMetric(RUNNING, lambda stats: stats.num_running),
    GroupMetric(WAITING, lambda stats: stats.num_waiting),
    GroupMetric(STEP_MEAN, lambda stats: stats.step_seconds),
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
)


class HistogramCell:
    """Counts per bucket. `observe` is on the path of every token: one bisection, two additions."""

    def __init__(self, buckets: Sequence[float]) -> None:
        self.buckets = buckets
        self.counts = [0] * (len(buckets) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """One sample, seconds."""
        self.counts[bisect_left(self.buckets, value)] += 1
        self.total += value

    def counts_now(self) -> HistogramCounts:
        """A copy of the counts."""
        return HistogramCounts(counts=list(self.counts), total=self.total)


class RouterMetrics:
    """The cells of one replica."""

    def __init__(
        self,
        *,
        model: str,
        replica: str,
        admission: Admission,
        groups: Callable[[], Iterable[GroupState]],
        clock: Callable[[], float],
    ) -> None:
        """`clock` is monotonic seconds."""
        self.model = model
        self.replica = replica
        self._admission = admission
        self._groups = groups
        self._totals = _CarriedTotals(clock)
        self._counts: dict[tuple[str, str], float] = {}
        self.ttft_s = HistogramCell(TTFT.buckets)
        self.e2e_s = HistogramCell(E2E.buckets)
        self.itl_s = HistogramCell(ITL.buckets)
        # From zero on: the step from no series to one would be no increase to Prometheus.
        for reason in REASONS:
            self.count(REQUESTS, 0, reason)
        self.count(CLIENT_ERRORS, 0, "invalid_value")
        self.count(SERVER_ERRORS, 0, "internal_error")
        for spec in COUNTERS:
            if not spec.labels:
                self.count(spec, 0)

    def count(self, spec: MetricSpec, amount: float = 1, label: str = "") -> None:
        """Adds to a counter; `label` is the value of its one own label, from a closed set."""
        key = (spec.name, label)
        self._counts[key] = self._counts.get(key, 0) + amount

    def value(self, spec: MetricSpec, label: str = "") -> float:
        """What a counter says now."""
        return self._counts.get((spec.name, label), 0)

    def snapshot(self) -> RouterSnapshot:
        """A copy of all cells."""
        states = list(self._groups())
        self._totals.update(states)
        present = {str(state.group_id): state for state in states}
        return RouterSnapshot(
            model=self.model,
            replica=self.replica,
            counters=[(name, label, value) for (name, label), value in sorted(self._counts.items())],
            histograms={
                spec.name: cell.counts_now()
                for spec, cell in zip(HISTOGRAMS, (self.ttft_s, self.e2e_s, self.itl_s), strict=True)
            },
            gauges=[
                (INFLIGHT.name, "", self._admission.num_inflight),
                (QUEUED.name, "", self._admission.num_queued),
                (QUEUED_TOKENS.name, "", self._admission.queued_tokens),
            ],
            groups=[
                _group_counts(group, present.get(group), self._totals.of(group))
                for group in self._totals.groups()
            ],
        )


def _group_counts(group: str, state: GroupState | None, totals: list[Series]) -> GroupCounts:
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


class _CarriedTotals:
    """Totals of groups that go on over epochs: what earlier epochs reached, plus the present one.

    Within an epoch the highest value counts: a group without a connection shows zeros. A group that has left
    is forgotten after RETAIN_S.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seen_at: dict[str, float] = {}
        self._epoch: dict[str, int] = {}
        self._before: dict[str, dict[str, float]] = {}  # group -> metric -> sum over earlier epochs
        self._now: dict[str, dict[str, float]] = {}

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
                name, value = row.spec.name, row.value(state.stats)
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
        return [(name, "", before.get(name, 0) + now) for name, now in self._now[group].items()]
