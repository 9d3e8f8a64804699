"""What a first chunk says of the time before it, and what a report says of blocks and reads."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.engine.test_fetch_table import HASHES, PROMPT, SOURCE, Peers
from tests.unit.engine.toy import make_engine, make_request, numbers, run
from workers.engine.exchange import Offered, Pulled
from workers.report import StepKind
from workers.types import BlockOffer, GroupId, StageTimes, TokenChunk


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def first(chunks: list[TokenChunk], name: str) -> TokenChunk:
    return next(chunk for chunk in chunks if chunk.request_id == name)


def test_queue_and_prefill_of_a_request_behind_another() -> None:
    clock = Clock()
    engine, executor = make_engine(max_running=1, max_step_tokens=8, clock=clock)

    def one_second(_: object) -> None:
        clock.now += 1.0

    executor.before_step = one_second
    engine.add(make_request("a", numbers(8), 3))
    clock.now += 0.5
    engine.add(make_request("b", numbers(20, seed=1), 2))
    chunks: list[TokenChunk] = []
    while engine.has_work():
        chunks += engine.step()
    assert first(chunks, "a").times == StageTimes(queue_s=0.5, transfer_s=0.0, compute_s=1.0)
    # Three steps of a while it waits; 20 tokens in steps of 8 are three more.
    assert first(chunks, "b").times == StageTimes(queue_s=3.0, transfer_s=0.0, compute_s=3.0)
    assert [chunk.times for chunk in chunks if chunk.request_id == "b"][1:] == [None]


def test_waiting_for_blocks_is_not_queueing() -> None:
    clock, peers = Clock(), Peers()
    engine, executor = make_engine(block_size=4, peers=peers, clock=clock, expected_output_tokens=1)
    engine.add(replace(make_request("r", PROMPT, 1), kv_source=SOURCE))
    clock.now = 0.25
    assert engine.step() == []  # asks for the blocks
    clock.now = 1.0
    offers = tuple(BlockOffer(index=index, block=40 + index, generation=7) for index in range(len(HASHES)))
    engine.handle(Offered(1, offers, True))
    ((_, pull_id, blocks),) = peers.pulled
    other, source = make_engine(block_size=4)
    other.add(make_request("p", PROMPT, 0))
    run(other)
    for place, (_, _, own) in enumerate(blocks):
        executor._pool[own * 4 : own * 4 + 4] = source._pool[place * 4 : place * 4 + 4]
    clock.now = 1.5
    engine.handle(Pulled(pull_id, transport="memory"))
    clock.now = 1.75
    (chunk,) = engine.step()
    assert chunk.times == StageTimes(queue_s=0.5, transfer_s=1.25, compute_s=0.0)
    stats = engine.stats()
    assert (stats.prompt_tokens_total, stats.cached_tokens_total, stats.remote_tokens_total) == (23, 20, 20)
    report = engine.take_report()
    assert report is not None
    (pulls,) = report.pulls
    assert (pulls.from_role, pulls.transport, pulls.num_blocks, pulls.num_failed) == ("other", "memory", 5, 0)
    assert (pulls.seconds.total, report.pulls_in_flight) == (0.5, 0)


def test_a_failed_pull_is_counted_by_the_role_of_its_source() -> None:
    peers = Peers()
    engine, _ = make_engine(block_size=4, peers=peers)
    source = replace(SOURCE, group_id=GroupId("prefill-x1"))
    engine.add(replace(make_request("r", PROMPT, 1), kv_source=source))
    engine.step()
    engine.handle(Offered(1, (BlockOffer(index=0, block=1, generation=7),), False))
    engine.handle(Pulled(1, "it broke"))
    run(engine)
    report = engine.take_report()
    assert report is not None
    (pulls,) = report.pulls
    assert (pulls.from_role, pulls.transport, pulls.num_blocks, pulls.num_failed) == ("prefill", "none", 0, 1)
    assert sum(pulls.seconds.counts) == 0
    assert engine.stats().remote_tokens_total == 0


def test_evicted_blocks_and_how_long_they_were_kept() -> None:
    clock = Clock()
    engine, _ = make_engine(num_blocks=4, block_size=4, clock=clock)
    engine.add(make_request("a", numbers(9), 1))
    run(engine)
    clock.now = 30.0
    engine.add(make_request("b", numbers(13, seed=1), 1))  # needs all blocks: two cached ones go
    run(engine)
    report = engine.take_report()
    assert report is not None
    assert (report.evictions_total, report.block_lifetime.total) == (2, 60.0)
    assert sum(report.block_lifetime.counts) == 2


def test_a_report_counts_steps_by_kind() -> None:
    engine, _ = make_engine(max_step_tokens=8)
    engine.add(make_request("a", numbers(20), 4))
    run(engine)
    report = engine.take_report()
    assert report is not None
    found = {steps.kind: sum(steps.seconds.counts) for steps in report.steps}
    assert found == {StepKind.PREFILL: 3, StepKind.DECODE: 3, StepKind.MIXED: 0}
    assert {steps.kind: steps.tokens.total for steps in report.steps}[StepKind.PREFILL] == 20
    assert engine.take_report() is None  # nothing new
    assert report.flop_total == 0.0 == pytest.approx(report.usage.compute_share)
