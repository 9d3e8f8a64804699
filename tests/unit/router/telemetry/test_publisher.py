"""Several replicas, one answer: what each counts, what they say of groups, and life without a board."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import httpx

from router.build import build_service
from router.dispatch.interface import GroupState
from router.http.app import create_app
from router.settings import RouterSettings
from router.telemetry.metrics import RouterMetrics
from router.telemetry.publisher import MetricsPublisher
from router.telemetry.snapshot import (
    LIVE_S,
    GroupCounts,
    ReplicaRow,
    RouterSnapshot,
    decode,
    encode,
    merged_groups,
)
from router.telemetry.table import CLIENT_ERRORS, GENERATION_TOKENS, REQUESTS, TTFT
from tests.unit.router.boards import LocalBoard
from tests.unit.router.client import until
from tests.unit.router.fakes import INFO, MODEL, FakeDispatcher, byte_tokenizer, stack
from tests.unit.router.scrapes import only, samples
from workers.directory.snapshots import RETAIN_S, Snapshot
from workers.types import GroupStats


class Replica:
    """A router whose dispatcher shows what a test says."""

    def __init__(self, name: str, board: LocalBoard, period_s: float = 1.0) -> None:
        self.dispatcher = FakeDispatcher(states=())
        settings = RouterSettings(model_name=MODEL, replica=name)
        self.service = build_service(self.dispatcher, byte_tokenizer(), settings)
        self.metrics: RouterMetrics = self.service.metrics
        self.telemetry = MetricsPublisher(self.metrics, board, period_s=period_s, timeout_s=0.1)
        self.app = create_app(self.service, settings, telemetry=self.telemetry)

    async def text(self) -> str:
        transport = httpx.ASGITransport(app=self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
            response = await client.get("/metrics")
        assert response.status_code == 200
        return response.text

    def sees(self, stats: GroupStats, *, epoch: int = 1, is_connected: bool = True) -> None:
        info = replace(INFO, epoch=epoch) if is_connected else None
        self.dispatcher.states = (
            GroupState(group_id=INFO.group_id, epoch=epoch, info=info, stats=stats, is_ready=is_connected),
        )


def run(case: Callable[[LocalBoard, Replica, Replica], Awaitable[None]]) -> None:
    async def go() -> None:
        board = LocalBoard()
        await case(board, Replica("r1", board), Replica("r2", board))

    asyncio.run(asyncio.wait_for(go(), 20))


def names(text: str, name: str, label: str) -> set[str]:
    return {dict(labels).get(label, "") for (found, labels) in samples(text) if found == f"tandem_{name}"}


def test_any_replica_answers_for_all() -> None:
    async def case(board: LocalBoard, one: Replica, two: Replica) -> None:
        one.metrics.count(REQUESTS, 3, "stop")
        two.metrics.count(REQUESTS, 4, "stop")
        two.metrics.count(CLIENT_ERRORS, 1, "invalid_type")
        two.metrics.ttft_s.observe(0.03)
        await one.text()
        for text in (await two.text(), await one.text()):
            assert only(text, "requests_total", replica="r1", reason="stop") == 3
            assert only(text, "requests_total", replica="r2", reason="stop") == 4
            assert only(text, "client_errors_total", replica="r2", code="invalid_type") == 1
            assert only(text, "ttft_seconds_bucket", replica="r2", le="0.02") == 0
            assert only(text, "ttft_seconds_bucket", replica="r2", le="0.04") == 1
            assert only(text, "ttft_seconds_count", replica="r1") == 0
            assert names(text, "requests_inflight", "replica") == {"r1", "r2"}

    run(case)


def test_a_replica_publishes_by_itself_and_a_new_directory_is_soon_full_again() -> None:
    async def go() -> None:
        board = LocalBoard()
        one, two = Replica("r1", board, period_s=0.01), Replica("r2", board)
        await one.telemetry.start()
        for generated in (5, 11):
            board.restart()
            one.metrics.count(GENERATION_TOKENS, generated - one.metrics.value(GENERATION_TOKENS))
            before = board.num_published
            await until(lambda before=before: board.num_published > before)
            assert only(await two.text(), "generation_tokens_total", replica="r1") == generated
        await one.telemetry.stop()
        await one.telemetry.stop()

    asyncio.run(asyncio.wait_for(go(), 20))


def test_a_replica_that_has_gone_keeps_its_totals_for_a_while_but_no_levels() -> None:
    async def case(board: LocalBoard, one: Replica, two: Replica) -> None:
        one.metrics.count(GENERATION_TOKENS, 7)
        one.sees(GroupStats(num_running=2, num_steps=9, generated_tokens_total=7))
        await one.telemetry.start()
        await until(lambda: board.num_published > 0)
        one.metrics.count(GENERATION_TOKENS, 1)  # between the last period and the end
        await one.telemetry.stop()
        text = await two.text()
        assert only(text, "generation_tokens_total", replica="r1") == 8
        assert only(text, "engine_generated_tokens_total", group="g0") == 7
        assert names(text, "requests_inflight", "replica") == {"r2"}
        assert names(text, "engine_running", "group") == names(text, "engine_up", "group") == set()
        board.clock.now += RETAIN_S
        assert names(await two.text(), "generation_tokens_total", "replica") == {"r2"}

    run(case)


def test_a_replica_that_died_has_no_levels_after_some_seconds() -> None:
    async def case(board: LocalBoard, one: Replica, two: Replica) -> None:
        one.metrics.count(GENERATION_TOKENS, 7)
        await one.text()
        board.clock.now += LIVE_S
        text = await two.text()
        assert names(text, "queue_requests", "replica") == {"r1", "r2"}
        assert only(text, "telemetry_age_seconds", replica="r1") == LIVE_S
        board.clock.now += 0.5
        text = await two.text()
        assert names(text, "queue_requests", "replica") == {"r2"}
        assert only(text, "generation_tokens_total", replica="r1") == 7

    run(case)


def test_without_a_board_the_answer_has_what_this_replica_alone_knows() -> None:
    async def case(board: LocalBoard, one: Replica, two: Replica) -> None:
        two.metrics.count(GENERATION_TOKENS, 9)
        await two.text()
        one.sees(GroupStats(num_running=2, num_steps=9, generated_tokens_total=7))
        for failures in (1, 2):
            board.error, board.is_silent = (ValueError("no actor"), False) if failures == 1 else (None, True)
            one.metrics.count(GENERATION_TOKENS, 1)
            text = await one.text()
            assert names(text, "generation_tokens_total", "replica") == {"r1"}
            assert only(text, "generation_tokens_total", replica="r1") == failures
            assert only(text, "engine_running", group="g0") == 2
            # Another replica may have told a higher one: a series that is missing does not fall.
            assert names(text, "engine_generated_tokens_total", "group") == set()
        board.is_silent = False
        text = await one.text()
        assert only(text, "telemetry_failures_total", replica="r1") == 2
        assert only(text, "generation_tokens_total", replica="r2") == 9
        assert only(text, "engine_generated_tokens_total", group="g0") == 7

    run(case)


def test_publishing_goes_on_after_a_failure() -> None:
    async def go() -> None:
        board = LocalBoard()
        one = Replica("r1", board, period_s=0.01)
        board.error = RuntimeError("away")
        await one.telemetry.start()
        await until(lambda: board.num_refused >= 2)
        board.error = None
        await until(lambda: board.num_published > 0)
        board.error = RuntimeError("away")
        await one.telemetry.stop()  # the last word is lost; nothing is raised

    asyncio.run(asyncio.wait_for(go(), 20))


def test_a_group_is_counted_once_from_the_newest_stats() -> None:
    async def case(board: LocalBoard, one: Replica, two: Replica) -> None:
        one.sees(GroupStats(num_running=1, num_steps=11, generated_tokens_total=40, free_blocks=3))
        two.sees(GroupStats(num_running=2, num_steps=10, generated_tokens_total=38, free_blocks=4))
        await one.text()
        for text in (await two.text(), await one.text()):
            assert names(text, "engine_running", "replica") == {""}
            assert only(text, "engine_running", group="g0") == 1
            assert only(text, "engine_generated_tokens_total", group="g0") == 40
            assert only(text, "kv_blocks", group="g0", state="free") == 3
        # The one with more steps has lost its connection, and sees zeros.
        one.sees(GroupStats(), is_connected=False)
        await one.text()
        text = await two.text()
        assert only(text, "engine_running", group="g0") == 2
        assert only(text, "engine_up", group="g0") == 1
        assert only(text, "engine_generated_tokens_total", group="g0") == 40
        # A new epoch starts from zero; the totals go on.
        two.sees(GroupStats(num_running=3, num_steps=1, generated_tokens_total=2), epoch=2)
        text = await two.text()
        assert only(text, "engine_running", group="g0") == 3
        assert only(text, "engine_epoch", group="g0") == 2
        assert only(text, "engine_generated_tokens_total", group="g0") == 40

    run(case)


def test_what_is_not_understood_is_left_out() -> None:
    async def case(board: LocalBoard, one: Replica, two: Replica) -> None:
        await board.publish(Snapshot(source="r0", number=1, body=b"\x93nonsense"))
        snapshot = two.metrics.snapshot()
        odd = RouterSnapshot(
            model=MODEL,
            replica="r2",
            totals=[
                *snapshot.totals,
                ("of_the_next_version", "", 1.0),
                (TTFT.name, "0.0123", 1.0),  # a bucket that there is not
                (REQUESTS.name, "stop twice", 1.0),  # a label too many
            ],
            gauges=[],
            groups=[],
        )
        await board.publish(Snapshot(source="r2", number=1, body=encode(odd)))
        text = await one.text()
        assert names(text, "generation_tokens_total", "replica") == {"r1", "r2"}
        assert names(text, "ttft_seconds_count", "replica") == {"r1"}
        assert names(text, "e2e_seconds_count", "replica") == {"r1", "r2"}
        assert "of_the_next_version" not in text
        assert only(await one.text(), "telemetry_failures_total", replica="r1") == 1

    run(case)


def test_a_snapshot_travels_as_it_is() -> None:
    router = stack()
    router.service.metrics.e2e_s.observe(0.07)
    snapshot = router.service.metrics.snapshot()
    assert decode(encode(snapshot)) == snapshot


def test_groups_of_two_models_stay_apart() -> None:
    def row(model: str, group: str, steps: float) -> ReplicaRow:
        counts = GroupCounts(
            group=group,
            role="unified",
            epoch=1,
            num_steps=1,
            is_connected=True,
            gauges=[],
            totals=[("s", "", steps)],
        )
        snapshot = RouterSnapshot(model=model, replica=model, totals=[], gauges=[], groups=[counts])
        return ReplicaRow(snapshot, 0.0)

    merged = merged_groups([row("m2", "g", 5), row("m1", "g", 4), row("m1", "g", 3)])
    assert [(group.model, group.totals) for group in merged] == [
        ("m1", [("s", "", 4)]),
        ("m2", [("s", "", 5)]),
    ]
