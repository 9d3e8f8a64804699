"""Steps counted, their work by hand-computed figures, and what holds them up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from workers.engine.meter import PERIOD_S, WINDOW_S, Ceilings, MeteredModel, StepMeter, usage_of
from workers.engine.step import SampleTask, SequenceSlice, StepPlan
from workers.engine.work import ModelWork, StepWork, step_work
from workers.report import STEP_TOKENS, Bound, StepKind
from workers.types import SamplingParams

# LLaMA-2-7B in 16 bit: 32 layers, hidden 4096, 32 heads of 128, MLP 11008, vocabulary 32000.
LINEAR, HEAD = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008), 32000 * 4096
LLAMA = ModelWork(
    linear_weights=LINEAR,
    head_weights=HEAD,
    attention_width=32 * 4096,
    weight_bytes=2 * (LINEAR + HEAD),
    kv_bytes_per_token=524_288,
)
SAMPLE = SampleTask(params=SamplingParams(max_tokens=1), choice=0, prompt_token_ids=(0,), output_token_ids=())


def piece(num_tokens: int, start: int = 0, *, samples: bool = True) -> SequenceSlice:
    return SequenceSlice(
        token_ids=(0,) * num_tokens, start=start, block_table=(), sample=SAMPLE if samples else None
    )


def plan(*slices: SequenceSlice) -> StepPlan:
    return StepPlan(number=1, slices=slices)


def test_the_prefill_of_a_long_prompt_by_the_textbook() -> None:
    """2,048 tokens: 26.5 TFLOP in the linear layers, 1.1 in causal attention."""
    work = step_work(LLAMA, plan(piece(2048, samples=False)))
    linear, attention = 2 * LINEAR * 2048, 4 * 32 * 4096 * (2048 * 2049 // 2)
    assert work.flop == linear + attention
    assert (linear / 1e12, attention / 1e12) == pytest.approx((26.5, 1.1), abs=0.05)
    assert work.read_bytes == LLAMA.weight_bytes + 2048 * 524_288
    chunks = [step_work(LLAMA, plan(piece(512, start, samples=False))) for start in range(0, 2048, 512)]
    assert sum(chunk.flop for chunk in chunks) == work.flop


def test_decode_reads_all_weights_and_every_context() -> None:
    work = step_work(LLAMA, plan(piece(1, 99), piece(1, 199)))
    assert work.flop == 2 * 2 * (LINEAR + HEAD) + 4 * 32 * 4096 * (100 + 200)
    assert work.read_bytes == 2 * (LINEAR + HEAD) + 300 * 524_288


def test_few_tokens_read_few_experts() -> None:
    """Of 8 experts, 2 a token: one token reads a quarter, two read seven sixteenths, many read all."""
    experts = LINEAR  # bytes: half of the layers'
    model = replace(LLAMA, expert_bytes=experts, expert_share=0.25, kv_bytes_per_token=0)
    for num_tokens, share in ((1, 1 / 4), (2, 7 / 16), (2048, 1.0)):
        read_bytes = step_work(model, plan(piece(num_tokens))).read_bytes
        assert read_bytes == LLAMA.weight_bytes - (1 - share) * experts


def test_rows_that_are_scored_pay_for_the_head() -> None:
    scored = SequenceSlice(token_ids=(0, 0, 0), start=0, block_table=(), prompt_targets=(1, 2))
    bare = step_work(LLAMA, plan(piece(3, samples=False)))
    assert step_work(LLAMA, plan(scored)).flop - bare.flop == 2 * HEAD * 2


A100 = Ceilings(flop_per_s=312e12, read_bytes_per_s=2e12)


def test_decode_at_batch_one_waits_for_memory() -> None:
    """13.2 GB over 2 TB/s are 6.6 ms: a step of 8 ms uses 83 % of the bandwidth, 0.5 % of the arithmetic."""
    work = step_work(LLAMA, plan(piece(1, 99)))
    usage = usage_of(0.008, 0.01, work, A100)
    assert usage.bound is Bound.BANDWIDTH
    assert (usage.busy_share, usage.bandwidth_share) == pytest.approx((0.8, 0.830), abs=5e-3)
    assert usage.compute_share == pytest.approx(0.0053, abs=1e-4)


def test_prefill_waits_for_arithmetic() -> None:
    """27.6 TFLOP in 0.15 s are 184 TFLOP/s of 312."""
    usage = usage_of(0.15, 0.15, step_work(LLAMA, plan(piece(2048, samples=False))), A100)
    assert usage.bound is Bound.COMPUTE
    assert usage.compute_share == pytest.approx(27.6e12 / 0.15 / 312e12, rel=0.01)


@pytest.mark.parametrize(
    ("busy_s", "window_s", "bound"),
    [(0.05, 0.05, Bound.OVERHEAD), (0.05, 10.0, Bound.IDLE), (0.0, 10.0, Bound.IDLE)],
)
def test_what_neither_explains_is_overhead_or_idleness(busy_s: float, window_s: float, bound: Bound) -> None:
    assert usage_of(busy_s, window_s, step_work(LLAMA, plan(piece(1, 99))), A100).bound is bound


def test_without_ceilings_nothing_is_claimed() -> None:
    usage = usage_of(1.0, 1.0, StepWork(1e12, 1e12), Ceilings(flop_per_s=0, read_bytes_per_s=0))
    assert (usage.compute_share, usage.bandwidth_share, usage.bound) == (0.0, 0.0, Bound.OVERHEAD)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_steps_by_kind() -> None:
    meter = StepMeter(None, Clock())
    meter.observe(plan(piece(100, samples=False)), 0, ended_s=1.0, seconds=0.02)
    meter.observe(plan(piece(1, 5), piece(1, 6)), 2, ended_s=2.0, seconds=0.01)
    meter.observe(plan(piece(1, 5), piece(30)), 1, ended_s=3.0, seconds=0.015)
    steps = {counts.kind: counts for counts in meter.steps()}
    assert {kind: sum(steps[kind].seconds.counts) for kind in StepKind} == dict.fromkeys(StepKind, 1)
    found = {kind: STEP_TOKENS[steps[kind].tokens.counts.index(1)] for kind in StepKind}
    assert found == {StepKind.PREFILL: 128, StepKind.DECODE: 2, StepKind.MIXED: 32}
    assert {kind: steps[kind].tokens.total for kind in StepKind} == {
        StepKind.PREFILL: 100, StepKind.DECODE: 2, StepKind.MIXED: 31,
    }  # fmt: skip


def test_a_report_is_due_each_second_at_the_end_and_until_it_says_idle() -> None:
    clock = Clock()
    meter = StepMeter(MeteredModel(work=LLAMA, ceilings=A100), clock)
    assert meter.is_due(is_idle=False)  # the first one
    meter.steps()
    assert not meter.is_due(is_idle=True)
    for _ in range(99):  # steps without a pause
        clock.now += 0.01
        meter.observe(plan(piece(1, 99)), 1, ended_s=clock.now, seconds=0.01)
    assert not meter.is_due(is_idle=False)
    clock.now = 100.0 + PERIOD_S
    assert meter.is_due(is_idle=False)
    meter.steps()
    assert meter.usage().bound is Bound.BANDWIDTH
    meter.observe(plan(piece(1, 99)), 1, ended_s=clock.now, seconds=0.01)
    assert not meter.is_due(is_idle=False)
    assert meter.is_due(is_idle=True)  # nothing follows: told at once
    meter.steps()
    bounds = []
    for _ in range(30):
        clock.now += PERIOD_S
        if meter.is_due(is_idle=True):
            meter.steps()
            bounds.append(meter.usage().bound)
    assert bounds[0] is Bound.BANDWIDTH
    assert bounds[-1] is Bound.IDLE
    assert len(bounds) <= WINDOW_S + 1  # then there is nothing more to say
