"""What the HTTP benchmark makes of its samples."""

from __future__ import annotations

from benchmarks.http import Samples, row_of


def test_a_row_holds_medians_and_the_cost_of_a_token() -> None:
    samples = Samples(
        http=[80.0, 90.0, 100.0],
        engine=[100.0, 120.0, 90.0],
        first_event_s=[0.1, 0.2, 0.4],
        cpu_s={"router": 0.003, "HAProxy": 0.0015},
        tokens=30,
    )
    row = row_of(8, samples)
    assert (row["http_tokens_per_s"], row["engine_tokens_per_s"], row["share_of_engine"]) == (
        90.0,
        100.0,
        0.9,
    )
    assert (row["first_event_p50_ms"], row["first_event_p99_ms"]) == (200.0, 400.0)
    assert row["cpu_us_per_token"] == {"HAProxy": 50.0, "router": 100.0}
