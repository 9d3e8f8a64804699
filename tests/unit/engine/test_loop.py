"""The engine's thread: commands in, outputs out, and every way it ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest

from tests.unit.engine.toy import ToyExecutor, make_engine, make_request, numbers, reference, replay
from workers.engine.engine import Engine
from workers.engine.exchange import Offered, OpenLease
from workers.engine.leases import LeaseId
from workers.engine.loop import EngineLoop, StepOutput
from workers.engine.step import GroupFailed, StepPlan
from workers.hashing import BlockHash, block_hashes
from workers.types import BlockOffer, BlockRead, FinishReason, GroupId, KVSource, RequestId, TokenChunk

TIMEOUT_S = 10.0


class Listener:
    """Collects outputs; waits for ends."""

    def __init__(self) -> None:
        self.outputs: list[StepOutput] = []
        self._changed = threading.Condition()

    def __call__(self, output: StepOutput) -> None:
        with self._changed:
            self.outputs.append(output)
            self._changed.notify_all()

    def chunks(self, name: str) -> list[TokenChunk]:
        return [chunk for output in self.outputs for chunk in output.chunks if chunk.request_id == name]

    def tokens(self, name: str) -> list[int]:
        return [token for chunk in self.chunks(name) for token in chunk.token_ids]

    def end(self, name: str, num_choices: int = 1) -> list[TokenChunk]:
        """The last chunk of each choice, once they are there."""

        def ends() -> list[TokenChunk]:
            return [chunk for chunk in self.chunks(name) if chunk.finish_reason is not None]

        with self._changed:
            done = self._changed.wait_for(lambda: len(ends()) >= num_choices, TIMEOUT_S)
            assert done, f"{name} has not ended"
            return ends()

    def wait_for_output(self, is_wanted: Callable[[StepOutput], bool]) -> bool:
        """Whether the newest output comes to be one that is wanted."""
        with self._changed:
            return self._changed.wait_for(lambda: is_wanted(self.outputs[-1]), TIMEOUT_S)

    def wait_for_tokens(self, name: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.tokens(name) != [], TIMEOUT_S)


@contextmanager
def _running(engine: Engine) -> Iterator[tuple[EngineLoop, Listener]]:
    listener = Listener()
    loop = EngineLoop(engine, listener)
    loop.start()
    try:
        yield loop, listener
    finally:
        loop.stop(TIMEOUT_S)
        assert not loop.is_alive


def _slow(executor: ToyExecutor) -> None:
    executor.before_step = lambda plan: time.sleep(0.002)


def test_requests_from_many_threads_come_back_whole() -> None:
    engine, _ = make_engine(block_size=4)
    requests = [make_request(str(index), numbers(9, index), 12) for index in range(24)]
    with _running(engine) as (loop, listener):
        threads = [threading.Thread(target=loop.submit, args=(request,)) for request in requests]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
        for request in requests:
            assert listener.end(request.request_id)[0].finish_reason is FinishReason.LENGTH
            assert listener.tokens(request.request_id) == reference(request)
    assert listener.outputs[0].stats.free_blocks == 64  # said before anything was asked
    assert listener.outputs[-1].stats.finished_length_total == 24
    events = [event for output in listener.outputs for event in output.events]
    assert [event.number for event in events] == list(range(1, len(events) + 1))
    assert len(replay(events)) == listener.outputs[-1].stats.cached_blocks


def test_a_refused_request_is_told_why_for_each_choice_and_others_go_on() -> None:
    engine, executor = make_engine()
    _slow(executor)
    good = make_request("good", numbers(5), 40)
    with _running(engine) as (loop, listener):
        loop.submit(good)
        loop.submit(make_request("bad", (1, 2, 1000), num_choices=2))
        loop.submit(make_request("worse", (1,), num_choices=0))
        bad = listener.end("bad", 2)
        assert [(chunk.choice, chunk.finish_reason, chunk.error_code) for chunk in bad] == [
            (0, FinishReason.ERROR, "invalid_value"),
            (1, FinishReason.ERROR, "invalid_value"),
        ]
        assert bad[0].error == "prompt[2] is 1000: token ids are whole numbers from 0 to 96."
        assert listener.end("worse")[0].error == "n is 0: it must be a whole number from 1 to 128."
        listener.end("good")
        assert listener.tokens("good") == reference(good)


def test_a_request_that_breaks_add_ends_alone() -> None:
    engine, _ = make_engine()
    with _running(engine) as (loop, listener):
        loop.submit(make_request("bad", (1,), cache_salt="x", max_tokens=None))  # type: ignore[arg-type]  # hostile
        assert listener.end("bad")[0].finish_reason is FinishReason.ERROR
        loop.submit(make_request("odd", (1,), stop_token_ids=5))  # type: ignore[arg-type]  # hostile
        assert listener.end("odd")[0].error_code == "internal_error"
        loop.submit(make_request("good", numbers(5), 3))
        listener.end("good")
        assert listener.tokens("good") == reference(make_request("good", numbers(5), 3))


def test_abort_ends_open_choices_as_cancelled_and_frees_their_blocks() -> None:
    engine, executor = make_engine()
    _slow(executor)
    with _running(engine) as (loop, listener):
        loop.submit(make_request("a", numbers(40), 500, num_choices=2, ignore_eos=True))
        listener.wait_for_tokens("a")
        loop.abort(RequestId("unknown"))
        loop.abort(RequestId("a"))
        ends = listener.end("a", 2)
        assert [chunk.finish_reason for chunk in ends] == [FinishReason.CANCELLED] * 2
        output = next(output for output in listener.outputs if ends[0] in output.chunks)
        assert (output.stats.active_blocks, output.stats.cancelled_total) == (0, 1)


def test_idle_it_waits_without_steps_or_outputs() -> None:
    engine, executor = make_engine()
    with _running(engine) as (loop, listener):
        loop.submit(make_request("a", numbers(5), 2))
        listener.end("a")
        time.sleep(0.05)
        num_outputs, num_plans = len(listener.outputs), len(executor.plans)
        cpu = time.process_time()
        time.sleep(0.2)
        assert time.process_time() - cpu < 0.1
        assert (len(listener.outputs), len(executor.plans)) == (num_outputs, num_plans)
        loop.submit(make_request("b", numbers(5), 2))
        listener.end("b")


def test_exchanges_go_on_and_end_while_nothing_is_computed() -> None:
    told = threading.Event()
    now = [0.0]
    opened: list[int] = []

    class Peers:
        def open(self, fetch_id: int, source: KVSource, hashes: Sequence[BlockHash]) -> None:
            opened.append(fetch_id)
            told.set()

        def pull(self, fetch_id: int, pull_id: int, blocks: Sequence[BlockRead]) -> None:
            raise AssertionError("nothing was offered")

        def close(self, fetch_id: int) -> None:
            told.set()

    engine, executor = make_engine(block_size=4, clock=lambda: now[0], peers=Peers())
    prompt = numbers(9)
    source = KVSource(group_id=GroupId("P"), host="10.0.0.1", port=1)
    with _running(engine) as (loop, listener):
        loop.submit(make_request("a", prompt, 1))
        listener.end("a")
        loop.exchange(OpenLease(LeaseId("E/1"), tuple(block_hashes(prompt, 4)), None))
        loop.submit(replace(make_request("b", numbers(9, 2), 1), kv_source=source))
        assert told.wait(TIMEOUT_S)
        told.clear()
        assert listener.wait_for_output(lambda output: output.stats.kv_leases == 1)
        num_plans, cpu = len(executor.plans), time.process_time()
        time.sleep(0.2)
        assert time.process_time() - cpu < 0.1  # it waits, with a request that cannot get on
        now[0] = 9.0
        loop.renew_lease(LeaseId("E/1"))
        now[0] = 11.0  # the fetch has stalled, the lease has not expired
        assert told.wait(TIMEOUT_S)
        assert listener.end("b")[0].finish_reason is FinishReason.LENGTH
        assert (len(executor.plans), opened) == (num_plans + 1, [1])
        now[0] = 20.0
        assert listener.wait_for_output(lambda output: output.stats.kv_leases_expired_total == 1)
        assert listener.outputs[-1].stats.active_blocks == 0


def test_a_dead_group_is_told_to_everybody_now_and_later() -> None:
    engine, executor = make_engine()

    def die(plan: StepPlan) -> None:
        if plan.number == 3:
            raise GroupFailed("rank 1 is silent for 10.0 s")

    executor.before_step = die
    with _running(engine) as (loop, listener):
        loop.submit(make_request("a", numbers(5), 50, num_choices=2))
        ends = listener.end("a", 2)
        assert [(chunk.error_code, chunk.error) for chunk in ends] == [
            ("engine_dead", "rank 1 is silent for 10.0 s")
        ] * 2
        assert loop.failure == "rank 1 is silent for 10.0 s"
        loop.submit(make_request("late", numbers(5), 5))
        assert listener.end("late")[0].error_code == "engine_dead"
    failures = [output.failure for output in listener.outputs]
    assert [failure for failure in failures if failure is not None] == ["rank 1 is silent for 10.0 s"]
    last = next(output for output in listener.outputs if output.failure is not None)
    assert (last.stats.active_blocks, last.stats.finished_error_total) == (0, 1)


def test_a_bug_in_the_engine_ends_the_loop_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    def broken_clock() -> float:
        if engine.has_work():
            raise ArithmeticError("the engine itself")
        return 0.0

    engine, _ = make_engine(clock=broken_clock)
    with _running(engine) as (loop, listener):
        loop.submit(make_request("a", numbers(5), 50))
        end = listener.end("a")[0]
        assert (end.error_code, end.error) == ("engine_dead", loop.failure)
        assert loop.failure == "the engine loop failed: ArithmeticError('the engine itself')"
    assert "the engine loop ends" in caplog.messages


def test_what_was_refused_or_cancelled_before_the_last_step_is_heard_of() -> None:
    engine, executor = make_engine()
    entered, released = threading.Event(), threading.Event()

    def die(plan: StepPlan) -> None:
        if plan.number == 1:
            entered.set()
            assert released.wait(TIMEOUT_S)
        else:
            raise GroupFailed("rank 1 is gone")

    executor.before_step = die
    with _running(engine) as (loop, listener):
        loop.submit(make_request("a", numbers(5), 50))
        assert entered.wait(TIMEOUT_S)
        loop.submit(make_request("b", numbers(5), 50))
        loop.submit(make_request("bad", (1000,)))
        loop.abort(RequestId("b"))
        released.set()
        assert listener.end("a")[0].error_code == "engine_dead"
        assert [chunk.finish_reason for chunk in listener.end("b")] == [FinishReason.CANCELLED]
        assert [chunk.error_code for chunk in listener.end("bad")] == ["invalid_value"]


def test_what_was_refused_just_before_a_command_that_ends_the_group_is_heard_of() -> None:
    prompt = numbers(9)

    class Peers:
        """The source answers while the step that asks it runs, with another request behind it."""

        def open(self, fetch_id: int, source: KVSource, hashes: Sequence[BlockHash]) -> None:
            loop.submit(make_request("bad", (1000,)))
            loop.exchange(Offered(fetch_id, (BlockOffer(index=0, block=3, generation=1),), False))

        def pull(self, fetch_id: int, pull_id: int, blocks: Sequence[BlockRead]) -> None:
            raise GroupFailed("rank 1 is gone")

        def close(self, fetch_id: int) -> None:
            """Nothing to close."""

    engine, _ = make_engine(block_size=4, peers=Peers())
    with _running(engine) as (loop, listener):
        source = KVSource(group_id=GroupId("P"), host="h", port=1)
        loop.submit(replace(make_request("a", prompt), kv_source=source))
        assert [chunk.error for chunk in listener.end("a")] == ["rank 1 is gone"]
        assert [chunk.error_code for chunk in listener.end("bad")] == ["invalid_value"]


def test_stop_ends_all_that_is_open_and_refuses_the_rest() -> None:
    engine, executor = make_engine()
    _slow(executor)
    with _running(engine) as (loop, listener):
        loop.submit(make_request("a", numbers(5), 900, ignore_eos=True))
        listener.wait_for_tokens("a")
        loop.stop(TIMEOUT_S)
        assert not loop.is_alive
        end = listener.end("a")[0]
        assert (end.finish_reason, end.error_code) == (FinishReason.ERROR, "engine_dead")
        assert loop.failure is None
        loop.submit(make_request("late", numbers(5), 5, num_choices=2))
        assert [chunk.error for chunk in listener.end("late", 2)] == ["The engine is stopping."] * 2
        assert listener.outputs[-2].stats.active_blocks == 0


def test_stop_does_not_wait_longer_than_told_for_a_step_that_hangs() -> None:
    engine, executor = make_engine()
    entered, released = threading.Event(), threading.Event()

    def hang(plan: StepPlan) -> None:
        entered.set()
        released.wait(TIMEOUT_S)

    executor.before_step = hang
    with _running(engine) as (loop, listener):
        loop.submit(make_request("a", numbers(5), 2))
        assert entered.wait(TIMEOUT_S)
        loop.submit(make_request("b", numbers(5), 2))  # never looked at
        started = time.monotonic()
        loop.stop(0.05)
        assert time.monotonic() - started < 5
        assert loop.is_alive
        released.set()
        assert [listener.end(name)[0].error_code for name in "ab"] == ["engine_dead"] * 2


def test_a_listener_that_fails_ends_the_loop() -> None:
    engine, _ = make_engine()
    outputs: list[StepOutput] = []

    def listen(output: StepOutput) -> None:
        outputs.append(output)
        if output.chunks and output.failure is None:
            raise ConnectionError("nobody there")

    loop = EngineLoop(engine, listen)
    loop.start()
    loop.submit(make_request("a", numbers(5), 20))
    deadline = time.monotonic() + TIMEOUT_S
    while loop.is_alive and time.monotonic() < deadline:
        time.sleep(0.005)
    assert loop.failure == "the engine loop failed: ConnectionError('nobody there')"
    assert outputs[-1].failure == loop.failure
    assert outputs[-1].chunks[0].error_code == "engine_dead"
    loop.stop(TIMEOUT_S)
