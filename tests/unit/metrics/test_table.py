"""The tables of metrics: names as Prometheus wants them, closed labels, and an exposition of just these."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from router.admission import REJECTIONS
from router.dispatch.interface import (
    DecisionReason,
    MoveResult,
    PairState,
    PrefillOutcome,
    RetryReason,
    RouteCounts,
    SourceKind,
)
from router.telemetry import table
from router.telemetry.metrics import RouterMetrics
from router.telemetry.table import ROUTER_LABELS, ROUTER_METRICS
from router.telemetry.waterfall import STAGES
from tests.unit.router.client import COMPLETIONS, call
from tests.unit.router.fakes import READY, FakeDispatcher, stack
from workers.histogram import HistogramCounts, doubling, one_two_five
from workers.metrics.group import GROUP_LABELS, GROUP_METRICS
from workers.metrics.spec import Kind, MetricSpec
from workers.report import STEP_S, STEP_TOKENS, Bound, GroupReport, PullCounts, StepCounts, StepKind
from workers.types import GroupId

METRICS = (*ROUTER_METRICS, *GROUP_METRICS)
# Values that a label may have, whatever happens. Missing: ids of replicas and groups, and codes of errors,
# of which a process tells a limited number.
CLOSED = {
    "reason": {
        *table.REASONS, *REJECTIONS, *DecisionReason, *RetryReason, "cancelled",
        *("incomplete", "lost", "stalled", "void", "no_memory"),
    },
    "stage": {*STAGES, *table.DISCONNECT_STAGES},
    "source": {*SourceKind, "computed", "cached", "remote"},
    "outcome": {*PrefillOutcome},
    "result": {*MoveResult},
    "state": {"free", "cached", "active", "transferring"},
    "kind": {*(kind.value for kind in StepKind), "stored", "removed"},
    "bound": {bound.value for bound in Bound},
    "guess": {"accepted", "rejected"},
    "role": {"unified", "prefill", "decode"},
}  # fmt: skip
UNITS = ("seconds", "bytes", "tokens", "blocks", "requests", "ratio")


@pytest.mark.parametrize("spec", METRICS, ids=lambda spec: spec.name)
def test_a_name_is_as_prometheus_wants_it(spec: MetricSpec) -> None:
    """What `promtool check metrics` refuses, and units that are not the base ones."""
    assert re.fullmatch(r"[a-z][a-z0-9_]*", spec.name)
    assert spec.shown_name.startswith("tandem_")
    assert not re.search(r"_(total|count|sum|bucket|info_total)$", spec.name)
    assert not re.search(r"_(ms|s|us|kb|mb|gb|minutes|hours|percent|milliseconds)(_|$)", spec.name)
    assert not re.search(r"_(counter|gauge|histogram|summary|metric)(_|$)", spec.name)
    assert spec.shown_name.endswith("_total") == (spec.kind is Kind.COUNTER)
    assert re.match(r"[A-Z1]", spec.help) and not spec.help.endswith(".")
    if spec.kind is Kind.HISTOGRAM:
        assert spec.name.endswith(UNITS)
        assert list(spec.buckets) == sorted(set(spec.buckets)) and spec.buckets[0] > 0
    else:
        assert spec.buckets == ()


def test_names_are_unique_and_labels_are_not_reserved() -> None:
    assert max(Counter(spec.name for spec in METRICS).values()) == 1
    for shared, specs in ((ROUTER_LABELS, ROUTER_METRICS), (GROUP_LABELS, GROUP_METRICS)):
        for spec in specs:
            labels = (*shared, *spec.labels)
            assert len(set(labels)) == len(labels)
            assert not {"le", "quantile", "job", "instance", "deployment", "application"} & set(labels)


def report() -> GroupReport:
    """One with everything in it."""
    tokens = HistogramCounts(counts=(1,) * (len(STEP_TOKENS) + 1), total=9.0)
    seconds = HistogramCounts(counts=(2,) * (len(STEP_S) + 1), total=0.5)
    steps = tuple(StepCounts(kind=kind, tokens=tokens, seconds=seconds) for kind in StepKind)
    pulls = PullCounts(
        from_role="prefill", transport="memory", seconds=HistogramCounts(counts=(3, *[0] * 15), total=0.1),
        num_blocks=5, num_failed=2,
    )  # fmt: skip
    return GroupReport(
        steps=steps,
        block_lifetime=HistogramCounts(counts=(4, *[0] * 20), total=2.0),
        pulls=(pulls,),
        flop_per_s_ceiling=1e12,
        read_bytes_per_s_ceiling=1e10,
    )


def exposition() -> str:
    """`/metrics` of a router that has seen everything."""
    dispatcher = FakeDispatcher(states=(replace(READY, report=report()),))
    dispatcher.known_pairs = (PairState(GroupId("p"), GroupId("d"), 3, 1, 2.5e8, 4096),)
    dispatcher.routes = RouteCounts()
    app = stack(dispatcher, goodput_ttft_s=10.0).app
    assert call(app, COMPLETIONS, {"prompt": "a", "max_tokens": 3}).status_code == 200
    assert call(app, COMPLETIONS, {"prompt": "a", "n": 0}).status_code == 400
    return call(app, "/metrics").text


def test_the_exposition_has_every_row_of_the_tables_and_no_other() -> None:
    families = {family.name: family for family in text_string_to_metric_families(exposition())}
    wanted = {spec.shown_name.removesuffix("_total"): spec for spec in METRICS}
    assert families.keys() == wanted.keys()
    for name, family in families.items():
        spec = wanted[name]
        assert (family.type, family.documentation) == (spec.kind.value, spec.help)
        shared = GROUP_LABELS if spec in GROUP_METRICS else ROUTER_LABELS
        assert family.samples, name
        for sample in family.samples:
            assert sample.labels.keys() - {"le"} == {*shared, *spec.labels}
            for label, value in sample.labels.items():
                if label in CLOSED and not (label == "source" and "kv_pair" in name):
                    assert value in CLOSED[label], (name, label)


def test_a_histogram_of_a_group_has_all_buckets() -> None:
    found = {
        sample.labels["le"]: sample.value
        for family in text_string_to_metric_families(exposition())
        for sample in family.samples
        if sample.name == "tandem_engine_step_seconds_bucket" and sample.labels["kind"] == "mixed"
    }
    assert list(found.values()) == [2.0 * (index + 1) for index in range(len(STEP_S) + 1)]
    assert list(found) == [*map(str, STEP_S), "+Inf"]


def test_a_flood_of_codes_is_one_series_in_the_end() -> None:
    router = stack()
    metrics: RouterMetrics = router.service.metrics
    for number in range(10_000):
        metrics.count(table.SERVER_ERRORS, 1, f"odd_{number}")
    series = [entry for entry in metrics.snapshot().totals if entry[0] == table.SERVER_ERRORS.name]
    assert len(series) <= 65
    assert sum(value for _, _, value in series) == 10_000
    assert metrics.value(table.SERVER_ERRORS, "other") > 9_000


def test_bounds() -> None:
    assert doubling(0.5, 4) == (0.5, 1.0, 2.0, 4.0)
    assert one_two_five(1, 200) == (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0)
