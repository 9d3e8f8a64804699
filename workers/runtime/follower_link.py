"""A follower's control connection to rank 0: heartbeats out, steps in, and the end of rank 0 noticed.

A thread sends a heartbeat every second, whatever the main thread computes, and watches for rank 0's end of
the connection to close. The main thread reads steps; rank 0 sends heartbeats too, so a read that times out
means that rank 0 is stopped. When rank 0 is gone while the main thread is inside a step, the thread gives it
a moment to find out through its collective, then calls `on_leader_lost`.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Iterator
from threading import Event, Thread

from workers.runtime.frames import FrameKind, FrameSocket, PeerClosed, PeerSilent, ProtocolError
from workers.runtime.handshake import Facts, Rendezvous, join, pack_facts, unpack_facts
from workers.runtime.leader_link import PROGRESS, heartbeat_interval_s, interrupt_beside

_GRACE_S = 1.0  # for the main thread to end by itself
_AWAKE_S = 0.002  # after a step, as the next one mostly follows at once
_GONE = select.POLLRDHUP | select.POLLHUP | select.POLLERR


class LeaderLost(Exception):
    """Rank 0 ended, hangs, or told this rank why the group cannot go on."""


class FollowerLink:
    """Connection of rank > 0. `on_leader_lost` is called at most once, from the heartbeat thread."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        rank: int,
        *,
        timeout_s: float,
        join_timeout_s: float,
        on_leader_lost: Callable[[str], None],
    ) -> None:
        try:
            self._frames: FrameSocket = join(rendezvous, rank, timeout_s=join_timeout_s)
        except (PeerClosed, PeerSilent, ProtocolError) as error:
            raise LeaderLost(f"rank {rank} cannot join its group: {error}") from error
        self._frames.set_timeout(timeout_s)
        self._timeout_s = timeout_s
        self._on_leader_lost = on_leader_lost
        self._interrupts: list[Callable[[], None]] = []
        self._on_order: Callable[[bytes], None] | None = None
        self._begun = 0
        self._finished = 0
        self._closing = Event()
        self._heartbeat = Thread(target=self._beat, name="tandem-heartbeat", daemon=True)
        self._heartbeat.start()

    @property
    def own_address(self) -> str:
        """Address of this machine on the network that leads to rank 0."""
        return self._frames.own_address

    def interrupt_with(self, interrupt: Callable[[], None]) -> None:
        """`interrupt` ends collectives that this rank may be inside; called when rank 0 is gone, beside those
        that were given before, in a thread of its own: it may block."""
        self._interrupts.append(interrupt)

    def take_orders(self, on_order: Callable[[bytes], None]) -> None:
        """on_order(body) is called by the thread that reads steps, between two of them. It has to be quick;
        ProtocolError from it means that rank 0 cannot be understood."""
        self._on_order = on_order

    def agree(self, own: Facts, *, timeout_s: float) -> Facts:
        """Sends this rank's facts; returns what the group goes on with. Raises LeaderLost."""
        deadline = time.monotonic() + timeout_s
        self._send(FrameKind.FACTS, pack_facts(own))
        while time.monotonic() < deadline:
            kind, body = self._receive()
            if kind is FrameKind.AGREED:
                try:
                    return unpack_facts(body)
                except ProtocolError as error:
                    raise LeaderLost(f"rank 0 sent what is no message of ours: {error}") from error
            if kind is not FrameKind.HEARTBEAT:
                raise LeaderLost(f"rank 0 sent {kind.name} instead of what the ranks agree on")
        raise LeaderLost(f"rank 0 did not answer within {timeout_s:g} s")

    def steps(self) -> Iterator[bytes]:
        """Bodies of steps until rank 0 says stop. The step counts as finished when the next one is asked for.

        Raises LeaderLost.
        """
        awake_s = 0.0
        while True:
            kind, body = self._receive(awake_s)
            awake_s = 0.0
            if kind is FrameKind.STEP:
                self._begun += 1
                yield body
                self._finished += 1
                awake_s = _AWAKE_S
            elif kind is FrameKind.STOP:
                return
            elif kind is FrameKind.ORDER and self._on_order is not None:
                self._pass_order(self._on_order, body)
            elif kind is not FrameKind.HEARTBEAT:
                raise LeaderLost(f"rank 0 sent an unexpected {kind.name} message")

    def report(self, body: bytes) -> None:
        """Sends rank 0 what came of an order; from any thread. Nothing happens when rank 0 is gone itself."""
        try:
            self._frames.send(FrameKind.REPORT, body)
        except (PeerClosed, PeerSilent):
            return

    def report_fault(self, reason: str) -> None:
        """Tells rank 0 why this rank cannot go on; nothing happens when rank 0 is gone itself."""
        try:
            self._frames.send(FrameKind.FAULT, reason.encode()[:2000])
        except (PeerClosed, PeerSilent):
            return

    def close(self) -> None:
        """Ends the heartbeat and the connection. May be called twice."""
        self._closing.set()
        self._heartbeat.join(self._timeout_s)
        self._frames.close()

    def _pass_order(self, on_order: Callable[[bytes], None], body: bytes) -> None:
        try:
            on_order(body)
        except ProtocolError as error:
            raise LeaderLost(f"rank 0 sent an order that cannot be understood: {error}") from error

    def _send(self, kind: FrameKind, body: bytes) -> None:
        try:
            self._frames.send(kind, body)
        except (PeerClosed, PeerSilent) as error:
            raise LeaderLost(f"rank 0 died or hangs: {error}") from error

    def _receive(self, awake_s: float = 0.0) -> tuple[FrameKind, bytes]:
        try:
            kind, body = self._frames.receive(awake_s)
        except (PeerClosed, PeerSilent, ProtocolError) as error:
            raise LeaderLost(f"rank 0 died or hangs: {error}") from error
        if kind is FrameKind.FAULT:
            raise LeaderLost(body[:2000].decode("utf-8", "replace"))
        return kind, body

    def _beat(self) -> None:
        interval_s = heartbeat_interval_s(self._timeout_s)
        poller = select.poll()
        poller.register(self._frames.fileno(), _GONE)
        next_beat_s = 0.0
        while not self._closing.is_set():
            now = time.monotonic()
            if now >= next_beat_s:
                next_beat_s = now + interval_s
                try:
                    progress = PROGRESS.pack(self._begun, self._finished)
                    self._frames.send_if_idle(FrameKind.HEARTBEAT, progress)
                except (PeerClosed, PeerSilent) as error:
                    self._lost(str(error))
                    return
            # Short sleeps, so that close() does not wait for an interval.
            if poller.poll(1000 * min(0.1, interval_s)):
                self._lost("connection closed")
                return

    def _lost(self, why: str) -> None:
        for interrupt in self._interrupts:
            interrupt_beside(interrupt)
        if not self._closing.wait(_GRACE_S):
            self._on_leader_lost(f"rank 0 died: {why}")
