"""Rows of a sweep from runs made by hand, the knee, and the limit."""

import pytest

from cluster.bench.engine import EngineRun, TimedStep
from cluster.bench.kv_cache import growth
from cluster.bench.orders import EngineSettings, SweepOrder
from cluster.bench.sweep import mark_knee, row_of
from cluster.figures.step_cost import StepShape
from cluster.plan.devices import Roofs
from cluster.plan.models import find_model
from cluster.plan.roofline import Load

ORDER = SweepOrder(engine=EngineSettings(model="m"), prompt_tokens=100, new_tokens=5)
LOAD = Load.of(find_model("smollm2-135m").spec)


def step(rows: int, seconds: float, *, prefill: int = 0, blocks: int = 10) -> TimedStep:
    shape = StepShape(prefill_tokens=prefill, decode_rows=rows, context_tokens=rows * 100)
    return TimedStep(shape=shape, seconds=seconds, active_blocks=blocks)


def run() -> EngineRun:
    return EngineRun(
        seconds=1.4,
        first_s=[0.5, 1.0],
        last_s=[1.3, 1.4],
        steps=[
            step(0, 0.5, prefill=100),
            step(1, 0.5, prefill=99, blocks=40),
            *(step(2, 0.1) for _ in range(4)),
        ],
    )


def test_a_row() -> None:
    roofs = Roofs(read_bytes_per_s=10e9, flop_per_s=100e9)
    row = row_of(2, [run()], ORDER, LOAD, roofs, num_blocks=50)
    assert row["latency_s"] == 1.35
    assert (row["ttft_ms"], row["ttft_p99_ms"]) == (750.0, 1000.0)
    assert row["tpot_ms"] == pytest.approx((0.8 + 0.4) / 2 / 4 * 1e3)
    assert row["throughput_tokens_per_s"] == pytest.approx(10 / 1.4, abs=0.05)
    assert row["decode_tokens_per_s"] == 20.0
    assert row["prefill_tokens_per_s"] == 199.0
    assert row["kv_use"] == 0.8
    work = LOAD.decode(2, 102)
    assert row["decode_limit_tokens_per_s"] == round(2 / work.seconds(roofs), 1)
    assert row["read_share"] == round(work.read_bytes / 0.1 / 10e9, 3)
    assert row["flop_share"] == round(work.flop / 0.1 / 100e9, 3)
    assert row["limit_share"] == max(row["read_share"], row["flop_share"]) < 1
    assert row["bound"] == "bandwidth"


def test_ceilings_that_are_too_low_show() -> None:
    row = row_of(2, [run()], ORDER, LOAD, Roofs(read_bytes_per_s=1e9, flop_per_s=100e9), num_blocks=50)
    assert row["limit_share"] > 1


@pytest.mark.parametrize(
    ("latencies", "rates", "knee"),
    [
        ([1, 1.2, 2.0, 4.0], [10, 80, 160, 165], 2),
        ([1, 2.0, 4.0, 8.0], [10, 19, 20, 21], 0),
        ([1, 1.1, 1.2, 1.3], [10, 20, 40, 80], None),
    ],
)
def test_the_knee_is_where_latency_outgrows_throughput(latencies, rates, knee) -> None:
    rows = [
        {"latency_s": latency, "throughput_tokens_per_s": rate, "is_knee": False}
        for latency, rate in zip(latencies, rates, strict=True)
    ]
    mark_knee(rows)
    assert [i for i, row in enumerate(rows) if row["is_knee"]] == ([] if knee is None else [knee])


def test_growth_is_the_exponent_of_the_time_since_the_first_token() -> None:
    assert growth([5 + 2.0 * t for t in range(65)]) == pytest.approx(1.0)
    assert growth([5 + 0.1 * t**2 for t in range(65)]) == pytest.approx(2.0)
    assert growth([1.0, 2.0]) == 1.0
