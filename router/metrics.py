"""Metrics of a router replica: one table, plain cells, and the text of `/metrics`.

What the client saw is counted here (requests by reason, tokens delivered, times); what the groups say of
themselves is read from their stats at scrape time. Group totals start again with each epoch of a group; the
collector carries them on, so that no counter ever falls. Counters add up: requests_total over its reasons is
every request that was admitted, and the token counters equal the sum of the `usage` of all answers plus the
tokens of the aborted ones.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from router.admission import Admission
from router.dispatch import GroupState

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
    """One row of the table. Label `model` and `replica` come first on every series."""

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
COUNTERS = (
    REQUESTS,
    CLIENT_ERRORS,
    SERVER_ERRORS,
    PROMPT_TOKENS,
    CACHED_TOKENS,
    GENERATION_TOKENS,
    DISCONNECTS,
)
HISTOGRAMS = (TTFT, E2E, ITL)
INFLIGHT = MetricSpec("requests_inflight", "Admitted requests that have not ended")
QUEUED = MetricSpec("queue_requests", "Admitted requests without a token yet")
QUEUED_TOKENS = MetricSpec("queue_tokens", "Prompt tokens of those")
REASONS = ("stop", "length", "aborted", "error")

# Gauges and counters of a group: name, help, field of GroupStats.
GROUP_GAUGES = (
    ("engine_running", "Requests in the engine with blocks", "num_running"),
    ("engine_waiting", "Requests in the engine's queue", "num_waiting"),
    ("engine_step_mean_seconds", "Moving mean of a step's duration", "step_seconds"),
)
GROUP_COUNTERS = (
    ("engine_prompt_tokens", "Prompt tokens of requests the engine admitted", "prompt_tokens_total"),
    ("engine_cached_tokens", "Of those, found in its prefix cache", "cached_tokens_total"),
    ("engine_generated_tokens", "Tokens the engine sampled", "generated_tokens_total"),
    ("engine_preemptions", "Sequences put back for want of blocks", "preemptions_total"),
    ("engine_finished_stop", "Requests the engine ended at an end id", "finished_stop_total"),
    ("engine_finished_length", "Requests the engine ended at a length", "finished_length_total"),
    ("engine_finished_error", "Requests the engine ended with an error", "finished_error_total"),
    ("engine_cancelled", "Requests the engine was told to drop", "cancelled_total"),
    ("engine_steps", "Steps run", "num_steps"),
)
BLOCK_STATES = (("free", "free_blocks"), ("cached", "cached_blocks"), ("active", "active_blocks"))


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

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, samples at or below it), with +Inf last."""
        rows: list[tuple[str, float]] = []
        seen = 0
        for bound, count in zip((*map(str, self.buckets), "+Inf"), self.counts, strict=True):
            seen += count
            rows.append((bound, seen))
        return rows


class RouterMetrics(Collector):
    """The cells of one replica; registers itself with the registry it is given."""

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        model: str,
        replica: str,
        admission: Admission,
        groups: Callable[[], Iterable[GroupState]],
    ) -> None:
        self._registry = registry
        self._labels = [model, replica]
        self._admission = admission
        self._groups = groups
        self._totals = _CarriedTotals()
        self._counts: dict[tuple[str, str], float] = {}
        self.ttft_s = HistogramCell(TTFT.buckets)
        self.e2e_s = HistogramCell(E2E.buckets)
        self.itl_s = HistogramCell(ITL.buckets)
        for reason in REASONS:
            self.count(REQUESTS, 0, reason)
        for spec in (PROMPT_TOKENS, CACHED_TOKENS, GENERATION_TOKENS, DISCONNECTS):
            self.count(spec, 0)
        registry.register(self)

    def count(self, spec: MetricSpec, amount: float = 1, label: str = "") -> None:
        """Adds to a counter; `label` is the value of its one own label, from a closed set."""
        key = (spec.name, label)
        self._counts[key] = self._counts.get(key, 0) + amount

    def value(self, spec: MetricSpec, label: str = "") -> float:
        """What a counter says now."""
        return self._counts.get((spec.name, label), 0)

    def text(self) -> bytes:
        """The body of `/metrics`, Prometheus text format 0.0.4."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """All series, for the registry."""
        base = ["model", "replica"]
        for spec in COUNTERS:
            counter = CounterMetricFamily(PREFIX + spec.name, spec.help, labels=[*base, *spec.labels])
            for (name, label), value in sorted(self._counts.items()):
                if name == spec.name:
                    counter.add_metric([*self._labels, *([label] if spec.labels else [])], value)
            yield counter
        for spec, cell in zip(HISTOGRAMS, (self.ttft_s, self.e2e_s, self.itl_s), strict=True):
            histogram = HistogramMetricFamily(PREFIX + spec.name, spec.help, labels=base)
            histogram.add_metric(self._labels, cell.cumulative(), cell.total)
            yield histogram
        for spec, value in (
            (INFLIGHT, self._admission.num_inflight),
            (QUEUED, self._admission.num_queued),
            (QUEUED_TOKENS, self._admission.queued_tokens),
        ):
            gauge = GaugeMetricFamily(PREFIX + spec.name, spec.help, labels=base)
            gauge.add_metric(self._labels, value)
            yield gauge
        yield from self._collect_groups(list(self._groups()))

    def _collect_groups(self, states: list[GroupState]) -> Iterator[Metric]:
        labels = ["model", "replica", "group"]
        up = GaugeMetricFamily(PREFIX + "engine_up", "1 when the group answers with tokens", labels=labels)
        epoch = GaugeMetricFamily(PREFIX + "engine_epoch", "Starts of the group's ranks", labels=labels)
        blocks = GaugeMetricFamily(PREFIX + "kv_blocks", "Blocks of the KV pool", labels=[*labels, "state"])
        for state in states:
            own = [*self._labels, state.info.group_id]
            up.add_metric(own, 1 if state.ready else 0)
            epoch.add_metric(own, state.info.epoch)
            for name, field in BLOCK_STATES:
                blocks.add_metric([*own, name], getattr(state.stats, field))
        yield from (up, epoch, blocks)
        for name, help, field in GROUP_GAUGES:
            gauge = GaugeMetricFamily(PREFIX + name, help, labels=labels)
            for state in states:
                gauge.add_metric([*self._labels, state.info.group_id], getattr(state.stats, field))
            yield gauge
        self._totals.update(states)
        for name, help, field in GROUP_COUNTERS:
            counter = CounterMetricFamily(PREFIX + name, help, labels=labels)
            for group_id, total in self._totals.of(field):
                counter.add_metric([*self._labels, group_id], total)
            yield counter


class _CarriedTotals:
    """Totals of groups that go on over epochs: what earlier epochs reached, plus the present one."""

    def __init__(self) -> None:
        self._epoch: dict[str, int] = {}
        self._before: dict[tuple[str, str], float] = {}  # (group, field) -> sum over earlier epochs
        self._now: dict[tuple[str, str], float] = {}

    def update(self, states: Iterable[GroupState]) -> None:
        for state in states:
            group = state.info.group_id
            is_new_epoch = self._epoch.get(group, state.info.epoch) != state.info.epoch
            self._epoch[group] = state.info.epoch
            for _, _, field in GROUP_COUNTERS:
                key = (group, field)
                if is_new_epoch:
                    self._before[key] = self._before.get(key, 0) + self._now.get(key, 0)
                self._now[key] = getattr(state.stats, field)

    def of(self, field: str) -> list[tuple[str, float]]:
        """(group, total) of every group seen so far."""
        return [
            (group, self._before.get((group, name), 0) + now)
            for (group, name), now in sorted(self._now.items())
            if name == field
        ]
