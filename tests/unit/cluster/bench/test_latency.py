"""Percentiles, and what a run of requests amounts to."""

import pytest

from cluster.bench.latency import Limits, Outcome, summary
from cluster.figures.percentile import percentile


def outcome(number: int, due_s: float, *token_s: float, error: str = "", sent_late_s: float = 0.0) -> Outcome:
    return Outcome(
        number=number,
        due_s=due_s,
        sent_s=due_s + sent_late_s,
        token_s=token_s,
        end_s=token_s[-1] if token_s else due_s,
        prompt_tokens=100,
        output_tokens=len(token_s),
        cached_tokens=25,
        error=error,
    )


@pytest.mark.parametrize(
    ("percent", "expected"),
    [(0, 1), (1, 1), (10, 1), (11, 2), (50, 5), (90, 9), (91, 10), (99, 10), (100, 10)],
)
def test_percentiles_are_samples(percent: float, expected: int) -> None:
    assert percentile([10, 9, 8, 7, 6, 5, 4, 3, 2, 1], percent) == expected


def test_times_count_from_when_a_request_was_due() -> None:
    late = outcome(0, 1.0, 1.5, 1.6, 1.8, sent_late_s=0.3)
    assert late.ttft_ms == pytest.approx(500)
    assert late.latency_ms == pytest.approx(800)
    assert late.tpot_ms == pytest.approx(150)
    assert outcome(0, 1.0, 1.5).tpot_ms is None


def test_good_requests_keep_every_limit() -> None:
    found = outcome(0, 0.0, 0.2, 0.3, 0.4)
    assert found.is_good(Limits()) and found.is_good(Limits(ttft_ms=201, tpot_ms=101))
    assert not found.is_good(Limits(ttft_ms=199))
    assert not found.is_good(Limits(tpot_ms=99))
    assert outcome(0, 0.0, 0.2).is_good(Limits(tpot_ms=1))  # one token has no TPOT to miss
    assert not outcome(0, 0.0, error="status 503").is_good(Limits())


def test_summary() -> None:
    rows = [
        outcome(0, 0.0, 0.1, 0.2, 0.3),
        outcome(1, 1.0, 1.4, 1.5),
        outcome(2, 2.0, error="gone", sent_late_s=0.01),
        outcome(3, 3.0, 3.1, 4.0),
    ]
    found = summary(rows, Limits(ttft_ms=200, tpot_ms=500))
    assert (found["requests"], found["answered"], found["failed"]) == (4, 3, 1)
    assert found["answered_per_s"] == 0.75 and found["good_per_s"] == 0.25 and found["good_share"] == 0.25
    assert found["offered_per_s"] == pytest.approx(4 / 3, abs=1e-3)
    assert found["output_tokens_per_s"] == pytest.approx(7 / 4, abs=0.06)
    assert found["cached_share"] == 0.25
    assert found["ttft_ms"] == {"mean": 200, "p50": 100, "p90": 400, "p99": 400, "max": 400}
    assert found["itl_ms"]["max"] == 900
    assert found["send_delay_ms"]["max"] == 10


def test_nothing_answered_has_no_times() -> None:
    found = summary([outcome(0, 0.0, error="refused")], Limits())
    assert found["ttft_ms"] is None and found["tpot_ms"] is None and found["cached_share"] == 0
