"""Both ends of the control connections of a group, over loopback sockets, for tests."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

from workers.ports import open_port
from workers.runtime.follower_link import FollowerLink
from workers.runtime.frames import Frame, FrameKind, FrameSocket
from workers.runtime.handshake import Rendezvous, join, new_token
from workers.runtime.leader_link import LeaderLink

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
