"""Metrics of a router replica: one table, and the cells of one replica.

What the client saw is counted here (requests by reason, tokens delivered, times); what the groups say of
themselves is read from their stats. Counters add up: requests_total over its reasons is every request that
was admitted, and the token counters equal the sum of the `usage` of all answers plus the tokens of the
aborted ones. `telemetry` brings the cells of all replicas together, `exposition` writes them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence

from router.admission import Admission
from router.dispatch.interface import PREFILL_OUTCOMES, SOURCES, FetchCounts, GroupState, PairState
from router.telemetry.group_metrics import CarriedTotals, group_counts
from router.telemetry.metric_spec import MetricSpec
from router.telemetry.snapshot import HistogramCounts, RouterSnapshot, Series

_QUEUE_S = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0),
)
_WHOLE_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
_TOKEN_S = (
    *(0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0),
)


REQUESTS = MetricSpec("requests", "Admitted requests that ended, by reason", ("reason",))
CLIENT_ERRORS = MetricSpec("client_errors", "Requests refused as the client's mistake (4xx)", ("code",))
SERVER_ERRORS = MetricSpec("server_errors", "Requests refused or failed for our reasons (5xx)", ("code",))
PROMPT_TOKENS = MetricSpec("prompt_tokens", "Prompt tokens of admitted requests, as in usage")
CACHED_TOKENS = MetricSpec("cached_prompt_tokens", "Of those, found in a prefix cache")
GENERATION_TOKENS = MetricSpec("generation_tokens", "Tokens delivered, as in usage")
KV_SOURCES = MetricSpec(
    "kv_source_decisions", "Placed requests, by who was to give KV blocks of their prompt", ("source",)
)
KV_REDIRECTS = MetricSpec("kv_redirects", "Sources that failed, by who was to give instead", ("source",))
KV_PULLED = MetricSpec("kv_pulled_tokens", "Prompt tokens whose KV blocks were read from another group")
KV_RECOMPUTED = MetricSpec("kv_recomputed_tokens", "Prompt tokens that should have been read, and were not")
PREFILLS = MetricSpec("prefill_dispatches", "Prompts given to prefill groups, by how it ended", ("outcome",))
_PAIR = ("source", "reader")
KV_PAIR_READS = MetricSpec("kv_pair_reads", "Reads that brought KV blocks from a group to another", _PAIR)
KV_PAIR_FAILURES = MetricSpec("kv_pair_failures", "Those that brought nothing, though it was there", _PAIR)
KV_PAIR_BYTES = MetricSpec("kv_pair_bytes", "What the reads of two groups brought", _PAIR)
KV_PAIR_RATE = MetricSpec("kv_pair_bytes_per_second", "How fast placement expects a read to be", _PAIR)
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
    KV_SOURCES,
    KV_REDIRECTS,
    KV_PULLED,
    KV_RECOMPUTED,
    PREFILLS,
    KV_PAIR_READS,
    KV_PAIR_FAILURES,
    KV_PAIR_BYTES,
)
HISTOGRAMS = (TTFT, E2E, ITL)
INFLIGHT = MetricSpec("requests_inflight", "Admitted requests that have not ended")
QUEUED = MetricSpec("queue_requests", "Admitted requests without a token yet")
QUEUED_TOKENS = MetricSpec("queue_tokens", "Prompt tokens of those")
GAUGES = (INFLIGHT, QUEUED, QUEUED_TOKENS, KV_PAIR_RATE)
TELEMETRY_AGE = MetricSpec("telemetry_age_seconds", "Age of the replica's counts in this answer")
REASONS = ("stop", "length", "aborted", "error")


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
        fetches: Callable[[], FetchCounts],
        pairs: Callable[[], Iterable[PairState]],
        clock: Callable[[], float],
    ) -> None:
        """`clock` is monotonic seconds."""
        self.model = model
        self.replica = replica
        self._admission = admission
        self._groups = groups
        self._fetches = fetches
        self._pairs = pairs
        self._totals = CarriedTotals(clock)
        self._counts: dict[tuple[str, str], float] = {}
        self.ttft_s = HistogramCell(TTFT.buckets)
        self.e2e_s = HistogramCell(E2E.buckets)
        self.itl_s = HistogramCell(ITL.buckets)
        # From zero on: the step from no series to one would be no increase to Prometheus.
        for reason in REASONS:
            self.count(REQUESTS, 0, reason)
        self.count(CLIENT_ERRORS, 0, "invalid_value")
        self.count(SERVER_ERRORS, 0, "internal_error")
        for spec in (PROMPT_TOKENS, CACHED_TOKENS, GENERATION_TOKENS, DISCONNECTS, TELEMETRY_FAILURES):
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
        pairs = list(self._pairs())
        return RouterSnapshot(
            model=self.model,
            replica=self.replica,
            counters=[
                *((name, label, value) for (name, label), value in sorted(self._counts.items())),
                *_fetch_series(self._fetches()),
                *_pair_totals(pairs),
            ],
            histograms={
                spec.name: cell.counts_now()
                for spec, cell in zip(HISTOGRAMS, (self.ttft_s, self.e2e_s, self.itl_s), strict=True)
            },
            gauges=[
                (INFLIGHT.name, "", self._admission.num_inflight),
                (QUEUED.name, "", self._admission.num_queued),
                (QUEUED_TOKENS.name, "", self._admission.queued_tokens),
                *_pair_rates(pairs),
            ],
            groups=[
                group_counts(group, present.get(group), self._totals.of(group))
                for group in self._totals.groups()
            ],
        )


def _fetch_series(counts: FetchCounts) -> list[Series]:
    """Every value of each label, also what has not happened yet."""
    return [
        *((KV_SOURCES.name, source, counts.sources[source]) for source in SOURCES),
        *((KV_REDIRECTS.name, source, counts.redirects[source]) for source in SOURCES),
        (KV_PULLED.name, "", counts.pulled_tokens),
        (KV_RECOMPUTED.name, "", counts.recomputed_tokens),
        *((PREFILLS.name, outcome, counts.prefills[outcome]) for outcome in PREFILL_OUTCOMES),
    ]


def _pair_totals(pairs: Iterable[PairState]) -> Iterator[Series]:
    for pair in pairs:
        label = f"{pair.source} {pair.reader}"
        yield KV_PAIR_READS.name, label, pair.num_reads
        yield KV_PAIR_FAILURES.name, label, pair.num_failed
        yield KV_PAIR_BYTES.name, label, pair.num_bytes


def _pair_rates(pairs: Iterable[PairState]) -> Iterator[Series]:
    for pair in pairs:
        if pair.bytes_per_s is not None:
            yield KV_PAIR_RATE.name, f"{pair.source} {pair.reader}", pair.bytes_per_s
