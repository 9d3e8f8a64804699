"""The cells of one router replica, and its snapshot.

What the client saw is counted here (requests by reason, tokens delivered, times); what the groups say of
themselves is read from their stats. Counters add up: requests_total over its reasons is every request that
was admitted, and the token counters equal the sum of the `usage` of all answers plus the tokens of the
aborted ones. `publisher` brings the cells of all replicas together, `exposition` writes them.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import metadata

from router.admission import REJECTIONS, Admission
from router.dispatch.interface import (
    DecisionReason,
    Dispatcher,
    FetchCounts,
    MoveResult,
    PairState,
    PrefillOutcome,
    RetryReason,
    RouteCounts,
    SourceKind,
)
from router.telemetry import table
from router.telemetry.group_metrics import CarriedTotals
from router.telemetry.snapshot import RouterSnapshot
from router.telemetry.waterfall import STAGES
from workers.histogram import HistogramCell
from workers.metrics.spec import MetricSpec, Series, histogram_series

_MAX_VALUES = 64  # of a counter's own labels; what comes after them is counted as "other"
_OTHER = "other"


class RouterMetrics:
    """The cells of one replica. Used from one event loop."""

    def __init__(
        self,
        *,
        model: str,
        replica: str,
        version: str,
        admission: Admission,
        dispatcher: Dispatcher,
        clock: Callable[[], float],
    ) -> None:
        """`clock` is monotonic seconds."""
        self.model = model
        self.replica = replica
        self._build = f"{version} {_installed('ray')} {platform.python_version()}"
        self._admission = admission
        self._dispatcher = dispatcher
        self._totals = CarriedTotals(clock)
        self._counts: dict[str, dict[str, float]] = {}
        self.ttft_s = HistogramCell(table.TTFT.buckets)
        self.e2e_s = HistogramCell(table.E2E.buckets)
        self.itl_s = HistogramCell(table.ITL.buckets)
        self.tpot_s = HistogramCell(table.TPOT.buckets)
        self.queue_s = HistogramCell(table.QUEUE.buckets)
        self.prompt_tokens = HistogramCell(table.PROMPT_LENGTH.buckets)
        self.output_tokens = HistogramCell(table.OUTPUT_LENGTH.buckets)
        self.loop_lag_s = HistogramCell(table.LOOP_LAG.buckets)
        self.stages_s = {stage: HistogramCell(table.STAGE.buckets) for stage in STAGES}
        # From zero on: the step from no series to one would be no increase to Prometheus.
        for reason in table.REASONS:
            self.count(table.REQUESTS, 0, reason)
        for stage in table.DISCONNECT_STAGES:
            self.count(table.DISCONNECTS, 0, stage)
        self.count(table.CLIENT_ERRORS, 0, "invalid_value")
        self.count(table.SERVER_ERRORS, 0, "internal_error")
        for spec in (
            *(table.PROMPT_TOKENS, table.CACHED_TOKENS, table.GENERATION_TOKENS),
            table.TELEMETRY_FAILURES,
        ):
            self.count(spec, 0)

    def count(self, spec: MetricSpec, amount: float = 1, label: str = "") -> None:
        """Adds to a counter; `label` is the value of its one own label, from a closed set."""
        values = self._counts.setdefault(spec.name, {})
        if label not in values and len(values) >= _MAX_VALUES:
            label = _OTHER
        values[label] = values.get(label, 0) + amount

    def value(self, spec: MetricSpec, label: str = "") -> float:
        """What a counter says now."""
        return self._counts.get(spec.name, {}).get(label, 0)

    def observe_stages(self, stages: Mapping[str, float]) -> None:
        """The waterfall of one request. Stages that it did not have are not counted."""
        for stage, seconds in stages.items():
            if seconds > 0:
                self.stages_s[stage].observe(seconds)

    def snapshot(self) -> RouterSnapshot:
        """A copy of all cells."""
        states = list(self._dispatcher.groups())
        self._totals.update(states)
        pairs = list(self._dispatcher.pairs())
        routes = self._dispatcher.route_counts()
        return RouterSnapshot(
            model=self.model,
            replica=self.replica,
            totals=[
                *(
                    (name, label, value)
                    for name, values in self._counts.items()
                    for label, value in values.items()
                ),
                *self._histograms(),
                *((table.REJECTED.name, reason, self._admission.rejected[reason]) for reason in REJECTIONS),
                *_route_totals(routes),
                *_fetch_totals(self._dispatcher.fetch_counts()),
                *_pair_totals(pairs),
            ],
            gauges=[*self._levels(), (table.INDEX_BLOCKS.name, "", routes.index_blocks), *_pair_rates(pairs)],
            groups=self._totals.counts(states),
        )

    def _levels(self) -> Iterator[Series]:
        admission = self._admission
        yield table.INFLIGHT.name, "", admission.num_inflight
        yield table.QUEUED.name, "", admission.num_queued
        yield table.QUEUED_TOKENS.name, "", admission.queued_tokens
        yield table.OLDEST.name, "", admission.oldest_s
        yield table.BUILD.name, self._build, 1

    def _histograms(self) -> Iterator[Series]:
        cells = (
            (table.TTFT, self.ttft_s),
            (table.E2E, self.e2e_s),
            (table.ITL, self.itl_s),
            (table.TPOT, self.tpot_s),
            (table.QUEUE, self.queue_s),
            (table.PROMPT_LENGTH, self.prompt_tokens),
            (table.OUTPUT_LENGTH, self.output_tokens),
            (table.LOOP_LAG, self.loop_lag_s),
        )
        for spec, cell in cells:
            yield from histogram_series(spec, "", cell.counts_now())
        for stage, cell in self.stages_s.items():
            yield from histogram_series(table.STAGE, stage, cell.counts_now())


def _installed(package: str) -> str:
    """Its version; "none" when it is not there."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def _route_totals(counts: RouteCounts) -> Iterator[Series]:
    """Every value of each label, also what has not happened yet; so below."""
    yield from histogram_series(table.ROUTE, "", counts.seconds.counts_now())
    for reason in DecisionReason:
        yield table.DECISIONS.name, reason, counts.decisions[reason]
    for retry in RetryReason:
        yield table.RETRIES.name, retry, counts.retries[retry]
    for result in MoveResult:
        yield table.MIGRATIONS.name, result, counts.moves[result]
    yield table.PREDICTED_TOKENS.name, "", counts.predicted_tokens
    yield table.INDEX_EVENTS.name, "stored", counts.index_stored
    yield table.INDEX_EVENTS.name, "removed", counts.index_removed
    yield table.INDEX_GAPS.name, "", counts.index_gaps


def _fetch_totals(counts: FetchCounts) -> Iterator[Series]:
    for source in SourceKind:
        yield table.KV_SOURCES.name, source, counts.sources[source]
        yield table.KV_REDIRECTS.name, source, counts.redirects[source]
    yield table.KV_PULLED.name, "", counts.pulled_tokens
    yield table.KV_RECOMPUTED.name, "", counts.recomputed_tokens
    for outcome in PrefillOutcome:
        yield table.PREFILLS.name, outcome, counts.prefills[outcome]


def _pair_totals(pairs: Iterable[PairState]) -> Iterator[Series]:
    for pair in pairs:
        label = f"{pair.source} {pair.reader}"
        yield table.KV_PAIR_READS.name, label, pair.num_reads
        yield table.KV_PAIR_FAILURES.name, label, pair.num_failed
        yield table.KV_PAIR_BYTES.name, label, pair.num_bytes


def _pair_rates(pairs: Iterable[PairState]) -> Iterator[Series]:
    for pair in pairs:
        if pair.bytes_per_s is not None:
            yield table.KV_PAIR_RATE.name, f"{pair.source} {pair.reader}", pair.bytes_per_s
