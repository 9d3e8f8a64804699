from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

import httpx
import pytest

from router.admission import Admission
from router.api.errors import ApiError
from router.dispatch.interface import FetchCounts, GroupState, PairState, PrefillOutcome, SourceKind
from router.settings import RouterSettings
from router.telemetry.metrics import RouterMetrics
from tests.unit.router.client import COMPLETIONS, call, until
from tests.unit.router.fakes import INFO, READY, FakeDispatcher, says, stack
from tests.unit.router.scrapes import only, samples
from workers.directory.snapshots import RETAIN_S
from workers.histogram import HistogramCell
from workers.metrics.families import Source, families
from workers.metrics.spec import histogram, histogram_series
from workers.types import GroupId, GroupStats


def test_counts_add_up() -> None:
    """12 finished (6 by length, 6 by stop), 4 aborted after a token, 2 aborted in the queue, 2 refused."""

    async def run() -> str:
        gate = asyncio.Semaphore(10_000)
        router = stack(FakeDispatcher(says("hello", cached=1), gate=gate))
        transport = httpx.ASGITransport(app=router.app)
        usage = {"prompt_tokens": 0, "completion_tokens": 0}
        async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:

            def post(**body: Any) -> Any:
                return client.post(COMPLETIONS, json={"prompt": "ab", **body})

            for response in [await post(max_tokens=3) for _ in range(6)] + [
                await post(max_tokens=9, stop="lo") for _ in range(6)
            ]:
                for name in usage:
                    usage[name] += response.json()["usage"][name]
            for _ in range(2):
                assert (await post(max_tokens=0)).status_code == 400

            async def abort(num_tokens: int) -> None:
                while not gate.locked():
                    await gate.acquire()
                task = asyncio.create_task(post(max_tokens=9))
                await until(lambda: router.dispatcher.num_open == 1)
                for _ in range(num_tokens):
                    gate.release()
                await asyncio.sleep(0.02)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                assert router.dispatcher.num_open == 0

            for num_tokens in (1, 1, 1, 1, 0, 0):
                await abort(num_tokens)
            texts = [(await client.get("/metrics")).text for _ in range(10)]
        assert len(set(texts)) == 1
        text = texts[0]
        assert only(text, "prompt_tokens_total") == usage["prompt_tokens"] + 6 * 2
        assert only(text, "generation_tokens_total") == usage["completion_tokens"] + 4
        return text

    text = asyncio.run(asyncio.wait_for(run(), 20))
    by_reason = {
        reason: only(text, "requests_total", reason=reason)
        for reason in ("stop", "length", "aborted", "error")
    }
    assert by_reason == {"stop": 6, "length": 6, "aborted": 6, "error": 0}
    assert only(text, "client_errors_total", code="invalid_value") == 2
    assert only(text, "ttft_seconds_count") == 16
    assert only(text, "e2e_seconds_count") == 18
    assert only(text, "requests_inflight") == only(text, "queue_requests") == only(text, "queue_tokens") == 0
    assert only(text, "cached_prompt_tokens_total") == 16


def test_bucket_rows_never_fall_and_end_at_the_count() -> None:
    spec = histogram("x", "Help", (0.1, 1.0, 10.0))
    cell = HistogramCell(spec.buckets)
    for value in (0.05, 0.1, 0.5, 5.0, 50.0):
        cell.observe(value)
    (family,) = families([spec], (), [Source((), histogram_series(spec, "", cell.counts_now()))])
    found = [(sample.labels.get("le", sample.name), sample.value) for sample in family.samples]
    assert found == [
        *(("0.1", 2), ("1.0", 3), ("10.0", 4), ("+Inf", 5)),
        *(("tandem_x_count", 5), ("tandem_x_sum", 55.65)),
    ]
    text = call(stack().app, "/metrics").text
    rows: dict[str, list[float]] = {}
    for (name, _), value in samples(text).items():
        rows.setdefault(name, []).append(value)
    assert all(name.startswith("tandem_") for name in rows)
    assert "tandem_ttft_seconds_bucket" in rows


def test_ttft_includes_waiting() -> None:
    async def run() -> float:
        gate = asyncio.Semaphore(0)
        router = stack(FakeDispatcher(gate=gate))
        transport = httpx.ASGITransport(app=router.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
            task = asyncio.create_task(client.post(COMPLETIONS, json={"prompt": "a"}))
            await until(lambda: router.dispatcher.num_open == 1)
            await asyncio.sleep(0.2)
            for _ in range(20):
                gate.release()
            assert (await task).status_code == 200
        return router.service.metrics.ttft_s.total

    assert asyncio.run(run()) >= 0.2


def test_group_totals_go_on_over_epochs() -> None:
    dispatcher = FakeDispatcher()
    app = stack(dispatcher).app

    def total(epoch: int, generated: int) -> float:
        dispatcher.states = (
            replace(
                READY,
                epoch=epoch,
                info=replace(INFO, epoch=epoch),
                stats=GroupStats(generated_tokens_total=generated),
            ),
        )
        return only(call(app, "/metrics").text, "engine_generated_tokens_total", group="g0")

    assert [total(1, 5), total(1, 9), total(2, 0), total(2, 3), total(3, 1)] == [5, 9, 9, 12, 13]
    dispatcher.states = ()
    assert only(call(app, "/metrics").text, "engine_generated_tokens_total", group="g0") == 13
    assert total(2, 50) == 13  # a late word


def test_a_group_that_has_left_is_forgotten_after_a_while() -> None:
    clock, dispatcher = Clock(), FakeDispatcher()
    admission = Admission(RouterSettings(model_name="toy"), clock=clock, random=lambda: 0.5)
    metrics = RouterMetrics(
        model="toy", replica="router", version="1", admission=admission, dispatcher=dispatcher, clock=clock
    )
    assert [group.group for group in metrics.snapshot().groups] == ["g0"]
    dispatcher.states = ()
    clock.now = RETAIN_S - 1.0
    assert [(group.group, group.gauges) for group in metrics.snapshot().groups] == [("g0", [])]
    clock.now = RETAIN_S
    assert metrics.snapshot().groups == []


def test_group_gauges() -> None:
    stats = GroupStats(num_running=2, num_waiting=1, free_blocks=3, cached_blocks=4, active_blocks=5)
    dispatcher = FakeDispatcher(states=(replace_stats(stats),))
    text = call(stack(dispatcher).app, "/metrics").text
    assert only(text, "engine_running", group="g0") == 2
    assert only(text, "engine_up", group="g0") == 1
    assert [only(text, "kv_blocks", group="g0", state=s) for s in ("free", "cached", "active")] == [3, 4, 5]


def test_what_came_of_reading_blocks() -> None:
    counts = FetchCounts(
        sources=Counter(none=4, prefill=2), prefills=Counter(computed=2), redirects=Counter(none=1),
        pulled_tokens=96, recomputed_tokens=16,
    )  # fmt: skip
    stats = GroupStats(
        kv_fetches_total=5, kv_fetched_tokens_total=80, kv_fetches_lost_total=2, kv_fetches_stalled_total=1,
        kv_transferring_blocks=3, kv_leases=4,
    )  # fmt: skip
    dispatcher = FakeDispatcher(states=(replace_stats(stats),), fetches=counts)
    text = call(stack(dispatcher).app, "/metrics").text
    sources = {s: only(text, "kv_source_decisions_total", source=s) for s in SourceKind}
    assert sources == {"none": 4, "prefill": 2, "neighbour": 0}
    assert [only(text, "kv_redirects_total", source=s) for s in SourceKind] == [1, 0, 0]
    assert {o: only(text, "prefill_dispatches_total", outcome=o) for o in PrefillOutcome} == {
        "computed": 2, "refused": 0, "failed": 0, "crashed": 0, "overtaken": 0, "cancelled": 0,
    }  # fmt: skip
    assert only(text, "kv_pulled_tokens_total") == 96
    assert only(text, "kv_recomputed_tokens_total") == 16
    assert only(text, "kv_fetches_total", group="g0") == 5
    assert only(text, "kv_fetched_tokens_total", group="g0") == 80
    reasons = ("incomplete", "lost", "stalled", "void", "no_memory")
    assert [only(text, "kv_fetch_failures_total", group="g0", reason=r) for r in reasons] == [0, 2, 1, 0, 0]
    assert only(text, "kv_blocks", group="g0", state="transferring") == 3
    assert only(text, "kv_leases", group="g0") == 4


def test_what_is_known_of_pairs() -> None:
    known = (
        PairState(GroupId("p"), GroupId("d"), 3, 1, 2.5e8, 4096),
        PairState(GroupId("p"), GroupId("e"), 0, 2, None),
    )
    text = call(stack(FakeDispatcher(known_pairs=known)).app, "/metrics").text
    names = ("kv_pair_reads_total", "kv_pair_failures_total", "kv_pair_bytes_total")
    told = [[only(text, name, source="p", reader=reader) for name in names] for reader in ("d", "e")]
    assert told == [[3, 1, 4096], [0, 2, 0]]
    assert only(text, "kv_pair_bytes_per_second", source="p", reader="d") == 2.5e8
    assert text.count("tandem_kv_pair_bytes_per_second{") == 1  # the other one is not measured


def replace_stats(stats: GroupStats) -> GroupState:
    return replace(READY, stats=stats)


class Clock:
    """A clock that stands until it is moved."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_admission_by_tokens_and_requests() -> None:
    settings = RouterSettings(
        model_name="toy", max_queued_requests=3, max_queued_tokens=100, max_inflight_requests=4
    )
    clock = Clock()
    admission = Admission(settings, clock=clock, random=lambda: 0.5)
    first = admission.admit("", 500)  # alone, however long
    with pytest.raises(ApiError, match="prompt tokens are waiting"):
        admission.admit("", 1)
    clock.now = 40.0
    first.first_token()
    first.first_token()
    assert (admission.num_queued, admission.queued_tokens, admission.num_inflight) == (0, 0, 1)
    places = [admission.admit("", 50), admission.admit("", 50)]
    with pytest.raises(ApiError) as caught:
        admission.admit("", 1)
    assert caught.value.headers["retry-after"] == "4"  # a tenth of 40 s: the moving mean of one wait
    for place in places:
        place.first_token()
    admission.admit("", 1)
    with pytest.raises(ApiError, match="4 requests are in flight"):
        admission.admit("", 1)
    with first:
        pass
    assert admission.num_inflight == 3
