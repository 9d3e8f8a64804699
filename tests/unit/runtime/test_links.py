"""Rank 0's watchdog and a follower's heartbeat over real loopback sockets, in threads of this process."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.unit.runtime.links import (
    TIMEOUT_S,
    accept_in_background,
    follower,
    follower_of_silence,
    group,
    next_frame,
    raw_follower,
)
from workers.engine.step import GroupFailed
from workers.runtime.follower_link import FollowerLink, LeaderLost
from workers.runtime.frames import FrameKind, ProtocolError
from workers.runtime.handshake import join
from workers.runtime.leader_link import PROGRESS


def test_steps_arrive_in_order_and_the_end_is_orderly():
    with group(3) as made:
        accepting = accept_in_background(made.link)
        with follower(made, 1) as one, follower(made, 2) as two:
            accepting.join(5)
            seen: dict[int, list[bytes]] = {1: [], 2: []}
            threads = [
                threading.Thread(target=lambda rank, link: seen[rank].extend(link.steps()), args=pair)
                for pair in ((1, one), (2, two))
            ]
            for thread in threads:
                thread.start()
            bodies = [b"first", b"", b"x" * 300_000]
            for body in bodies:
                made.link.send_step(body)
            time.sleep(2 * TIMEOUT_S)  # idle for longer than the timeout: heartbeats keep both sides calm
            assert all(thread.is_alive() for thread in threads)
            closing = threading.Thread(target=made.link.close)
            closing.start()
            for thread in threads:
                thread.join(2)
            one.close()
            two.close()
            closing.join(2)
            assert not closing.is_alive()
            assert seen == {1: bodies, 2: bodies}
        assert made.failures == []


def test_a_follower_is_awake_after_a_step_and_then_sleeps():
    """By the time that its thread has computed until the end of the group."""
    used_s: dict[int, float] = {}

    def follow(link: FollowerLink, num_steps: int) -> None:
        began_s = time.thread_time()
        assert len(list(link.steps())) == num_steps
        used_s[num_steps] = time.thread_time() - began_s

    for num_steps in (0, 100):
        with group() as made:
            accepting = accept_in_background(made.link)
            with follower(made) as link:
                accepting.join(5)
                thread = threading.Thread(target=follow, args=(link, num_steps))
                thread.start()
                for _ in range(num_steps):
                    made.link.send_step(b"")
                    time.sleep(0.01)
                time.sleep(TIMEOUT_S)
                closing = threading.Thread(target=made.link.close)
                closing.start()
                thread.join(5)
                link.close()
                closing.join(5)
    assert used_s[0] < 0.01 < used_s[100] < TIMEOUT_S / 2


def test_orders_are_taken_between_steps_and_reported_from_any_thread():
    with group() as made:
        accepting = accept_in_background(made.link)
        with follower(made) as link:
            accepting.join(5)
            seen: list[bytes] = []
            reports: list[tuple[int, bytes]] = []
            reported = threading.Event()

            def take(body: bytes) -> None:
                seen.append(body)
                threading.Thread(target=link.report, args=(b"done " + body,)).start()

            def hear(rank: int, body: bytes) -> None:
                reports.append((rank, body))
                reported.set()

            link.take_orders(take)
            made.link.hear_reports(hear)
            reading = threading.Thread(target=lambda: seen.extend(link.steps()))
            reading.start()
            made.link.send_order(b"while idle")
            assert reported.wait(2) and reports == [(1, b"done while idle")]
            made.link.send_step(b"step")
            made.link.send_order(b"after it")
            closing = threading.Thread(target=made.link.close)
            closing.start()
            reading.join(2)
            link.close()
            closing.join(2)
            assert seen == [b"while idle", b"step", b"after it"]
        assert made.failures == []


def test_an_order_that_makes_no_sense_is_the_end_of_rank_0():
    def refuse(_body: bytes) -> None:
        raise ProtocolError("three blocks of four")

    with group() as made:
        accepting = accept_in_background(made.link)
        with follower(made) as link:
            accepting.join(5)
            link.take_orders(refuse)
            made.link.send_order(b"?")
            with pytest.raises(LeaderLost, match="cannot be understood: three blocks of four"):
                next(link.steps())


def test_a_report_that_makes_no_sense_is_the_end_of_the_group():
    def refuse(_rank: int, _body: bytes) -> None:
        raise ProtocolError("half a report")

    with group() as made:
        made.link.hear_reports(refuse)
        frames = raw_follower(made)
        frames.send(FrameKind.REPORT, b"?")
        assert "sent what is no message of ours: half a report" in made.reason(within_s=TIMEOUT_S)
        frames.close()


def test_a_closed_connection_is_noticed_at_once():
    with group() as made:
        frames = raw_follower(made)
        frames.close()
        assert made.reason(within_s=TIMEOUT_S).startswith("rank 1 (pid ")
        assert "died" in made.failures[0]
        with pytest.raises(GroupFailed, match="rank 1"):
            made.link.send_step(b"")


def test_a_step_of_rank_0_that_does_not_end_is_noticed_where_collectives_have_no_timeout():
    with group() as made:
        accepting = accept_in_background(made.link)
        with follower(made) as other:
            accepting.join(5)
            interrupted = threading.Event()
            made.link.interrupt_with(interrupted.set)
            made.link.limit_steps()
            reasons: list[str] = []

            def follow() -> None:
                try:
                    list(other.steps())
                except LeaderLost as error:
                    reasons.append(str(error))

            following = threading.Thread(target=follow)
            following.start()
            for body in (b"ends", b"waits for the next one"):
                made.link.send_step(body)
                made.link.end_step()
            time.sleep(1.5 * TIMEOUT_S)  # between steps nothing is overdue
            assert made.failures == []
            for body in (b"ends", b"hangs", b"is behind it"):  # all begun before the first has ended
                made.link.send_step(body)
            made.link.end_step()
            assert "rank 0 has been in step 4 for 1." in made.reason(within_s=3 * TIMEOUT_S)
            assert "a rank hangs in a collective" in made.failures[0]
            assert interrupted.wait(2)
            made.link.close()
            following.join(5)
            assert reasons == ["rank 0 died or hangs: connection closed"]


def test_a_step_ends_once_unless_the_group_has_failed():
    with group() as made:
        frames = raw_follower(made)
        made.link.send_step(b"")
        made.link.end_step()
        with pytest.raises(AssertionError, match="all 1 steps have ended"):
            made.link.end_step()
        frames.close()
        made.reason(within_s=TIMEOUT_S)
        made.link.end_step()


def test_a_start_that_hangs_ends_the_group():
    """In a collective of the warm-up, say, while all heartbeats go on."""
    with group() as made:
        accepting = accept_in_background(made.link)
        with follower(made):
            accepting.join(5)
            interrupted = [threading.Event(), threading.Event()]
            for each in interrupted:
                made.link.interrupt_with(each.set)
            with made.link.limited("what is quick", TIMEOUT_S):
                pass
            time.sleep(1.5 * TIMEOUT_S)  # nothing is limited any more
            assert made.failures == []
            with pytest.raises(ValueError, match="of its own"), made.link.limited("what fails", TIMEOUT_S):
                raise ValueError("of its own")
            with pytest.raises(GroupFailed) as caught, made.link.limited("the warm-up", 0.5 * TIMEOUT_S):
                reason = made.reason(within_s=2 * TIMEOUT_S)
                raise RuntimeError("NCCL communicator was aborted")
            assert reason == "the warm-up has taken more than 0.5 s: a rank hangs, in a collective perhaps"
            assert str(caught.value) == reason
            assert all(each.wait(2) for each in interrupted)


def test_an_interrupt_that_blocks_keeps_nobody_from_hearing_of_the_end():
    graphs_are_freed, interrupted = threading.Event(), threading.Event()

    def interrupt() -> None:
        graphs_are_freed.wait(30)
        interrupted.set()

    with group() as made:
        frames = raw_follower(made)
        made.link.interrupt_with(interrupt)
        frames.close()
        assert "died" in made.reason(within_s=TIMEOUT_S)
        with pytest.raises(GroupFailed, match="rank 1"):
            made.link.check()
        closing = threading.Thread(target=made.link.close)
        closing.start()
        closing.join(5)
        assert not closing.is_alive() and not interrupted.is_set()
    lost = threading.Event()
    link, connection = follower_of_silence(lambda reason: lost.set())
    link.interrupt_with(interrupt)
    connection.close()
    assert lost.wait(10) and not interrupted.is_set()
    link.close()
    graphs_are_freed.set()
    assert interrupted.wait(5)


def test_a_silent_follower_is_noticed_after_the_timeout():
    with group() as made:
        start = time.monotonic()
        frames = raw_follower(made)  # never sends a heartbeat
        assert "silent" in made.reason(within_s=3 * TIMEOUT_S)
        assert TIMEOUT_S <= time.monotonic() - start < 3 * TIMEOUT_S
        frames.close()


def test_a_follower_that_begins_no_step_is_noticed():
    with group() as made:
        frames = raw_follower(made)
        made.link.send_step(b"step")
        start = time.monotonic()
        while not made.failed.is_set() and time.monotonic() - start < 3 * TIMEOUT_S:
            frames.send(FrameKind.HEARTBEAT, PROGRESS.pack(0, 0))
            time.sleep(0.1)
        assert "alive but has not begun step 1" in made.reason(within_s=0.1)
        frames.close()


def test_a_long_step_is_no_fault():
    with group() as made:
        frames = raw_follower(made)
        made.link.send_step(b"step")
        until = time.monotonic() + 2 * TIMEOUT_S
        while time.monotonic() < until:
            frames.send(FrameKind.HEARTBEAT, PROGRESS.pack(1, 0))
            time.sleep(0.1)
        assert made.failures == []
        frames.close()


@pytest.mark.parametrize(
    ("kind", "body", "says"),
    [
        (FrameKind.FAULT, b"MemoryError: no room", "rank 1 .* failed: MemoryError: no room"),
        (FrameKind.STEP, b"", "unexpected STEP"),
        (FrameKind.HEARTBEAT, b"short", "unexpected HEARTBEAT"),
    ],
)
def test_what_a_follower_says_ends_the_group(kind, body, says):
    with group() as made:
        frames = raw_follower(made)
        frames.send(kind, body)
        made.reason(within_s=TIMEOUT_S)
        with pytest.raises(GroupFailed, match=says):
            made.link.check()
        frames.close()


def test_what_a_follower_said_before_it_left_is_heard_while_others_are_awaited():
    with group(3) as made, ThreadPoolExecutor(1) as pool:
        accepting = pool.submit(made.link.accept, 5.0)
        frames = join(made.rendezvous, 1, timeout_s=5)
        frames.send(FrameKind.HEARTBEAT, PROGRESS.pack(0, 0))
        frames.send(FrameKind.FAULT, b"MemoryError: no room")
        frames.close()
        with pytest.raises(GroupFailed, match=r"rank 1 \(pid \d+\) failed: MemoryError: no room"):
            accepting.result(5)


def test_explain_prefers_the_watchdog():
    with group() as made:
        frames = raw_follower(made)
        closing = threading.Timer(0.1, frames.close)
        closing.start()
        error = made.link.explain(RuntimeError("Connection closed by peer"), wait_s=2.0)
        assert "rank 1" in str(error) and "died" in str(error)
        closing.join()


def test_explain_without_the_watchdog_says_how_far_each_rank_came():
    with group() as made:
        frames = raw_follower(made)
        made.link.send_step(b"")
        frames.send(FrameKind.HEARTBEAT, PROGRESS.pack(1, 0))
        time.sleep(0.3)
        error = made.link.explain(RuntimeError("timed out"), wait_s=0.0)
        assert "step failed on rank 0: timed out" in str(error)
        assert "has begun 1 and finished 0 of 1 steps" in str(error)
        assert made.reason(within_s=TIMEOUT_S) == str(error)
        frames.close()


def test_follower_notices_that_rank_0_is_gone_and_that_it_is_silent():
    for close, says in ((True, "died"), (False, f"silent for {TIMEOUT_S:g} s")):
        lost: list[str] = []
        link, connection = follower_of_silence(lost.append)
        if close:
            connection.close()
        with pytest.raises(LeaderLost, match=says):
            next(link.steps())
        link.close()
        connection.close()
        assert lost == []  # the main thread found out by itself


def test_follower_reports_rank_0_lost_while_its_main_thread_computes():
    lost = threading.Event()
    link, connection = follower_of_silence(lambda reason: lost.set())
    connection.close()
    assert lost.wait(10)
    link.close()


def test_next_frame_skips_heartbeats():
    with group() as made:
        frames = raw_follower(made)
        time.sleep(TIMEOUT_S / 2)
        made.link.send_step(b"s")
        assert next_frame(frames) == (FrameKind.STEP, b"s")
        frames.close()
