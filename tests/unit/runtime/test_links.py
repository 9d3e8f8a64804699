"""Rank 0's watchdog and a follower's heartbeat over real loopback sockets, in threads of this process."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from workers.engine.step import GroupFailed
from workers.runtime.agreement import agree_on_identity, agree_on_memory, memory_facts, num_blocks_of
from workers.runtime.follower_link import FollowerLink, LeaderLost
from workers.runtime.frames import Frame, FrameKind, FrameSocket, PeerClosed, PeerSilent, ProtocolError
from workers.runtime.handshake import Rendezvous, join, new_token, open_port, pack_facts
from workers.runtime.leader_link import PROGRESS, LeaderLink

TIMEOUT_S = 1.0


class Group:
    """A leader link, and what its watchdog reported."""

    def __init__(self, world_size: int) -> None:
        listener = open_port("127.0.0.1")
        port, token = listener.getsockname()[1], new_token()
        self.rendezvous = Rendezvous(host="127.0.0.1", store_port=0, control_port=port, token=token)
        self.failures: list[str] = []
        self.failed = threading.Event()
        self.link = LeaderLink(
            listener, token, world_size=world_size, timeout_s=TIMEOUT_S, on_failure=self._failed
        )

    def _failed(self, reason: str) -> None:
        self.failures.append(reason)
        self.failed.set()

    def reason(self, within_s: float) -> str:
        assert self.failed.wait(within_s), f"no failure within {within_s} s"
        assert self.failures == [self.link.failure]
        return self.failures[0]


@contextlib.contextmanager
def group(world_size: int = 2) -> Iterator[Group]:
    made = Group(world_size)
    try:
        yield made
    finally:
        made.link.close()


def accept_in_background(leader: LeaderLink) -> threading.Thread:
    thread = threading.Thread(target=leader.accept, args=(5.0,))
    thread.start()
    return thread


def raw_follower(made: Group, rank: int = 1) -> FrameSocket:
    """A follower that does only what the test says."""
    accepting = accept_in_background(made.link)
    frames = join(made.rendezvous, rank, timeout_s=5)
    accepting.join(5)
    return frames


def next_frame(frames: FrameSocket) -> Frame:
    while (frame := frames.receive()).kind is FrameKind.HEARTBEAT:
        pass
    return frame


@contextlib.contextmanager
def follower(made: Group, rank: int = 1) -> Iterator[FollowerLink]:
    link = FollowerLink(
        made.rendezvous,
        rank,
        timeout_s=TIMEOUT_S,
        join_timeout_s=5.0,
        on_leader_lost=lambda reason: made.failures.append(f"follower: {reason}"),
    )
    try:
        yield link
    finally:
        link.close()


def follower_of_silence(on_leader_lost: Callable[[str], None]) -> tuple[FollowerLink, socket.socket]:
    """A follower, and rank 0's end of its connection, on which nothing comes after the greeting."""
    listener = open_port("127.0.0.1")
    port = listener.getsockname()[1]
    rendezvous = Rendezvous(host="127.0.0.1", store_port=0, control_port=port, token=new_token())
    accepted: list[socket.socket] = []

    def challenge() -> None:
        connection, _ = listener.accept()
        FrameSocket(connection, timeout_s=5).send(FrameKind.CHALLENGE, b"n" * 32)
        accepted.append(connection)

    thread = threading.Thread(target=challenge)
    thread.start()
    link = FollowerLink(rendezvous, 1, timeout_s=TIMEOUT_S, join_timeout_s=5, on_leader_lost=on_leader_lost)
    thread.join(5)
    listener.close()
    return link, accepted.pop()


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


def test_a_closed_connection_is_noticed_at_once():
    with group() as made:
        frames = raw_follower(made)
        frames.close()
        assert made.reason(within_s=TIMEOUT_S).startswith("rank 1 (pid ")
        assert "died" in made.failures[0]
        with pytest.raises(GroupFailed, match="rank 1"):
            made.link.send_step(b"")


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


def test_strangers_are_dropped_and_ours_still_come_in():
    with group() as made:
        accepting = accept_in_background(made.link)
        for noise in (b"", b"GET / HTTP/1.1\r\n\r\n" * 10, b"\xff" * 64):
            with socket.create_connection(("127.0.0.1", made.rendezvous.control_port)) as stranger:
                stranger.sendall(noise)
        wrong = replace(made.rendezvous, token=new_token())
        impostor = join(wrong, 1, timeout_s=5)
        with pytest.raises(PeerClosed):
            impostor.receive()
        frames = join(made.rendezvous, 1, timeout_s=5)
        accepting.join(5)
        assert not accepting.is_alive()
        assert made.failures == []
        frames.close()


def test_who_comes_early_waits_for_the_others_beyond_the_timeout():
    with group(3) as made:
        accepting = accept_in_background(made.link)
        with follower(made, 1) as early:
            answers: list[dict[str, str | int]] = []
            waiting = threading.Thread(
                target=lambda: answers.append(dict(early.agree(memory_facts(7), timeout_s=20)))
            )
            waiting.start()
            time.sleep(1.5 * TIMEOUT_S)
            assert waiting.is_alive()
            late = join(made.rendezvous, 2, timeout_s=5)
            accepting.join(5)
            late.send(FrameKind.FACTS, pack_facts(memory_facts(8)))
            agreed = made.link.agree(memory_facts(9), agree_on_memory, timeout_s=5)
            waiting.join(5)
            assert answers == [agreed] and num_blocks_of(agreed) == 7
            late.close()


def test_who_comes_early_and_dies_is_named():
    with group(3) as made:
        reasons: list[str] = []

        def accept() -> None:
            try:
                made.link.accept(20.0)
            except GroupFailed as error:
                reasons.append(str(error))

        accepting = threading.Thread(target=accept)
        accepting.start()
        join(made.rendezvous, 1, timeout_s=5).close()
        accepting.join(10)
        assert len(reasons) == 1 and reasons[0].startswith("rank 1 (pid ") and "died" in reasons[0]


def test_missing_ranks_are_named():
    with (
        group(4) as made,
        pytest.raises(GroupFailed, match=r"ranks \[1, 2, 3\] did not connect within 0.2 s"),
    ):
        made.link.accept(0.2)


def test_ranks_agree_on_the_smallest_pool():
    with group() as made:
        accepting = accept_in_background(made.link)
        with follower(made) as other:
            accepting.join(5)
            answers = []
            thread = threading.Thread(
                target=lambda: answers.append(other.agree(memory_facts(70), timeout_s=5))
            )
            thread.start()
            agreed = made.link.agree(memory_facts(90), agree_on_memory, timeout_s=5)
            thread.join(5)
            assert num_blocks_of(agreed) == 70
            assert answers == [agreed]


def test_a_difference_is_told_to_all_ranks():
    own = {"code": "a", "dtype": "float32", "machine": "m"}
    with group() as made:
        accepting = accept_in_background(made.link)
        with follower(made) as other:
            accepting.join(5)
            reasons: list[str] = []

            def agree() -> None:
                try:
                    other.agree({**own, "code": "b", "machine": "n"}, timeout_s=5)
                except LeaderLost as error:
                    reasons.append(str(error))

            thread = threading.Thread(target=agree)
            thread.start()
            with pytest.raises(GroupFailed, match=r"differ in code \(rank 0: a, rank 1: b\)$") as raised:
                made.link.agree(own, agree_on_identity, timeout_s=5)
            thread.join(5)
            assert reasons == [str(raised.value)]


def test_machines_are_counted():
    facts = [{"code": "a", "machine": name} for name in ("m", "n", "m")]
    assert agree_on_identity(dict(enumerate(facts))) == {"m": 2, "n": 1}


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


def test_frames_of_nonsense_are_refused():
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    ours.close()
    theirs.close()
    listener = open_port("127.0.0.1")
    for noise, says in ((b"\xff\xff\xff\xff\x01", "4294967295 bytes"), (b"\0\0\0\0\x63", "kind 99")):
        client = socket.create_connection(listener.getsockname())
        connection, _ = listener.accept()
        frames = FrameSocket(connection, timeout_s=1)
        client.sendall(noise)
        with pytest.raises(ProtocolError, match=says):
            frames.receive()
        frames.close()
        client.close()
    listener.close()


def test_frames_split_anywhere_come_out_whole():
    listener = open_port("127.0.0.1")
    client = socket.create_connection(listener.getsockname())
    connection, _ = listener.accept()
    listener.close()
    frames = FrameSocket(connection, timeout_s=1)
    message = b"\x03\0\0\0\x05abc" + b"\0\0\0\0\x06" + b"\x02\0\0\0\x05de"
    for byte in message:
        client.sendall(bytes([byte]))
    got = [frames.receive() for _ in range(3)]
    assert got == [(FrameKind.STEP, b"abc"), (FrameKind.HEARTBEAT, b""), (FrameKind.STEP, b"de")]
    with pytest.raises(PeerSilent, match="silent for 1 s"):
        frames.receive()
    client.close()
    with pytest.raises(PeerClosed):
        frames.receive()
    frames.close()


def test_next_frame_skips_heartbeats():
    with group() as made:
        frames = raw_follower(made)
        time.sleep(TIMEOUT_S / 2)
        made.link.send_step(b"s")
        assert next_frame(frames) == (FrameKind.STEP, b"s")
        frames.close()


def test_facts_that_are_no_facts_end_the_start_on_both_sides():
    with group() as made:
        frames = raw_follower(made)
        frames.send(FrameKind.FACTS, b"[1, 2]")
        with pytest.raises(GroupFailed, match=r"rank 1 \(pid \d+\) sent what is no message of ours"):
            made.link.agree({"dtype": "float32"}, agree_on_identity, timeout_s=TIMEOUT_S)
        frames.close()
    link, rank_0 = follower_of_silence(lambda reason: None)
    with contextlib.closing(link), rank_0:
        FrameSocket(rank_0, timeout_s=TIMEOUT_S).send(FrameKind.AGREED, b"no JSON")
        with pytest.raises(LeaderLost, match="rank 0 sent what is no message of ours"):
            link.agree({"dtype": "float32"}, timeout_s=TIMEOUT_S)
