"""Rank 0's control connections to its followers, and the watchdog over them.

Life of a group: `accept` (followers connect and prove themselves; the watchdog runs once all are there) ->
`agree` (facts compared or reduced, as often as needed) -> `send_step` for every step, `send_order` for what
there is to do beside them -> `close`.

The watchdog is a thread of its own, because the engine's thread may sit inside a collective that cannot be
interrupted. It ends the group, once, when
- a follower's connection closes: its process is gone (the kernel closes it at once, also after SIGKILL);
- a follower sends no heartbeat for the timeout: it is stopped, or its machine is gone;
- a follower is alive but does not begin a step for the timeout;
- a follower says that it cannot go on.
A follower that hangs inside a step is found by the collective's own timeout, which `executor` reports here.
Collectives in a CUDA graph have none: with `limit_steps` the watchdog ends the group, too, when
- rank 0 is inside a step for the timeout.
The start has collectives, too, and no steps: `limited` is for these.
"""

from __future__ import annotations

import logging
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import Empty, Queue
from threading import Event, Lock, Thread, current_thread

from workers.engine.step import GroupFailed
from workers.runtime.frames import Frame, FrameKind, FrameSocket, PeerClosed, PeerSilent, ProtocolError
from workers.runtime.handshake import Facts, pack_facts, unpack_facts, welcome

PROGRESS = struct.Struct("<qq")  # body of a follower's heartbeat: steps begun, steps finished
_LAST_WORDS_S = 1.0  # for the watchdog to read those of a follower that has gone
_log = logging.getLogger(__name__)


def heartbeat_interval_s(timeout_s: float) -> float:
    """Several heartbeats fit into a timeout; one a second is enough."""
    return min(1.0, timeout_s / 4)


def interrupt_beside(interrupt: Callable[[], None]) -> None:
    """Calls it in a thread that nobody waits for: NCCL's abort blocks while a graph holds its collectives."""
    Thread(target=interrupt, name="tandem-interrupt", daemon=True).start()


@dataclass(slots=True)
class _Follower:
    rank: int
    pid: int
    frames: FrameSocket
    last_heard_s: float
    begun: int = 0
    finished: int = 0
    facts: Queue[bytes] = field(default_factory=Queue)

    @property
    def name(self) -> str:
        return f"rank {self.rank} (pid {self.pid})"


class LeaderLink:
    """Connections to ranks 1 .. world_size - 1. `on_failure` is called once, from the watchdog's thread."""

    def __init__(
        self,
        listener: socket.socket,
        token: str,
        *,
        world_size: int,
        timeout_s: float,
        on_failure: Callable[[str], None],
    ) -> None:
        self._listener = listener
        self._token = token
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._on_failure = on_failure
        self._interrupts: list[Callable[[], None]] = []
        self._on_report: Callable[[int, bytes], None] | None = None
        self._followers: dict[int, _Follower] = {}
        self._steps_sent = 0
        self._step_sent_at_s = 0.0
        self._has_step_limit = False
        self._limit: tuple[float, str] | None = None  # when the group ends, and why
        self._num_steps_open = 0  # that rank 0 has not got what it wanted of
        self._failure: str | None = None
        self._failing = Lock()
        self._failed = Event()
        self._closing = Event()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._watchdog = Thread(target=self._watch, name="tandem-watchdog", daemon=True)

    @property
    def failure(self) -> str | None:
        """Why the group ended; None while it lives."""
        return self._failure

    def interrupt_with(self, interrupt: Callable[[], None]) -> None:
        """`interrupt` ends collectives that this rank may be inside; called once the group has failed, beside
        those that were given before, in a thread of its own: it may block."""
        self._interrupts.append(interrupt)

    def hear_reports(self, on_report: Callable[[int, bytes], None]) -> None:
        """on_report(rank, body) is called in the watchdog's thread. It has to be quick; ProtocolError from it
        ends the group."""
        self._on_report = on_report

    def limit_steps(self) -> None:
        """From now on a step of rank 0 that takes longer than the timeout ends the group."""
        self._has_step_limit = True

    @contextmanager
    def limited(self, what: str, timeout_s: float) -> Iterator[None]:
        """What takes longer inside ends the group. Only from `accept` on is there a watchdog. What is raised
        inside once the group has failed becomes GroupFailed."""
        reason = f"{what} has taken more than {timeout_s:g} s: a rank hangs, in a collective perhaps"
        self._limit = time.monotonic() + timeout_s, reason
        try:
            yield
        except Exception:
            self.check()  # a collective that was interrupted does not say why
            raise
        finally:
            self._limit = None

    def accept(self, timeout_s: float, is_lost: Callable[[int], str | None] = lambda rank: None) -> None:
        """Waits until all followers are there. Raises GroupFailed naming those that are not, or with what
        `is_lost` says of one that will never come; it is asked about once a second."""
        deadline = time.monotonic() + timeout_s
        while len(self._followers) < self._world_size - 1:
            left_s = deadline - time.monotonic()
            missing = sorted(set(range(1, self._world_size)) - set(self._followers))
            if left_s <= 0:
                raise GroupFailed(f"ranks {missing} did not connect within {timeout_s:g} s")
            # Those that are here already must not take the wait for the others for silence.
            if (problem := self._send_heartbeats()) is not None:
                raise GroupFailed(problem)
            if lost := next(filter(None, map(is_lost, missing)), None):
                raise GroupFailed(lost)
            self._listener.settimeout(min(left_s, heartbeat_interval_s(self._timeout_s)))
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            arrived = welcome(connection, self._token)
            if arrived is None:
                _log.warning("a connection to the control port did not prove that it is one of our ranks")
                continue
            frames, rank, pid = arrived
            if not 1 <= rank < self._world_size or rank in self._followers:
                frames.close()
                raise GroupFailed(f"pid {pid} says it is rank {rank}, which is taken or outside the group")
            frames.set_timeout(self._timeout_s)
            self._followers[rank] = _Follower(rank, pid, frames, time.monotonic())
        self._listener.close()
        self._watchdog.start()

    def agree(self, own: Facts, decide: Callable[[dict[int, Facts]], Facts], *, timeout_s: float) -> Facts:
        """Collects facts of all ranks, lets `decide` reduce them, tells all ranks the result, returns it.

        `decide` raises GroupFailed on a mismatch; the followers are told why. Raises GroupFailed too when a
        follower dies, has no facts within the timeout, or sends what are none.
        """
        by_rank: dict[int, Facts] = {0: own}
        deadline = time.monotonic() + timeout_s
        for follower in self._followers.values():
            body = self._await_facts(follower, deadline)
            try:
                by_rank[follower.rank] = unpack_facts(body)
            except ProtocolError as error:
                raise GroupFailed(f"{follower.name} sent what is no message of ours: {error}") from error
        try:
            agreed = decide(by_rank)
        except GroupFailed as refusal:
            self._try_send_all(FrameKind.FAULT, str(refusal).encode())
            raise
        self._send_all(FrameKind.AGREED, pack_facts(agreed))
        return agreed

    def send_step(self, body: bytes) -> None:
        """Hands a step to all followers. Raises GroupFailed when one is known to be gone."""
        self.check()
        self._step_sent_at_s = time.monotonic()
        self._steps_sent += 1
        self._num_steps_open += 1
        self._send_all(FrameKind.STEP, body)

    def end_step(self) -> None:
        """Rank 0 has what it wanted of the oldest step that it has not ended. Once the group has failed there
        need not be one: the step may not have been sent."""
        if self._num_steps_open:
            self._num_steps_open -= 1
        else:
            assert self._failure is not None, f"all {self._steps_sent} steps have ended: one more cannot"

    def send_order(self, body: bytes) -> None:
        """Hands an order to all followers, which take it between two steps. Raises as `send_step`."""
        self.check()
        self._send_all(FrameKind.ORDER, body)

    def check(self) -> None:
        """Raises GroupFailed once the group has failed."""
        if self._failure is not None:
            raise GroupFailed(self._failure)

    def explain(self, error: Exception, wait_s: float) -> GroupFailed:
        """Ends the group because a step failed on rank 0, or for what the watchdog finds out within the wait.

        A dead peer shows first as an error of the collective, which does not say who died.
        """
        if not self._failed.wait(wait_s):
            seen = "; ".join(
                f"{follower.name} has begun {follower.begun} and finished {follower.finished} of "
                f"{self._steps_sent} steps"
                for follower in self._followers.values()
            )
            self._fail(f"step failed on rank 0: {error} ({seen})")
        return GroupFailed(self._failure or str(error))

    def close(self) -> None:
        """Tells followers to end, waits until they have, for at most the timeout. May be called twice."""
        with self._failing:
            if self._closing.is_set():
                return
            self._closing.set()
            self._wake_writer.send(b"x")
        if self._watchdog.is_alive() and self._watchdog is not current_thread():
            self._watchdog.join(self._timeout_s)
        if self._failure is None:
            self._try_send_all(FrameKind.STOP, b"")
            self._await_ends()
        for follower in self._followers.values():
            follower.frames.close()
        for end in (self._listener, self._wake_reader, self._wake_writer):
            end.close()

    def _await_ends(self) -> None:
        deadline = time.monotonic() + self._timeout_s
        for follower in self._followers.values():
            try:
                while (left := deadline - time.monotonic()) > 0:
                    follower.frames.set_timeout(left)
                    follower.frames.receive()
            except (PeerClosed, PeerSilent, ProtocolError):
                continue

    def _await_facts(self, follower: _Follower, deadline: float) -> bytes:
        while True:
            self.check()
            try:
                return follower.facts.get(timeout=0.05)
            except Empty:
                if time.monotonic() >= deadline:
                    raise GroupFailed(f"{follower.name} was not ready in time") from None

    def _send_all(self, kind: FrameKind, body: bytes) -> None:
        for follower in self._followers.values():
            try:
                follower.frames.send(kind, body)
            except (PeerClosed, PeerSilent) as error:
                if not self._failed.wait(_LAST_WORDS_S):  # the watchdog reads what it has said before
                    self._fail(f"{follower.name} died or hangs: {error}")
                self.check()

    def _try_send_all(self, kind: FrameKind, body: bytes) -> None:
        """Best effort: a follower that is not reached sees the connection close."""
        for follower in self._followers.values():
            try:
                follower.frames.send(kind, body)
            except (PeerClosed, PeerSilent):
                continue

    def _fail(self, reason: str) -> None:
        """From any thread. The watchdog calls `on_failure`: the engine's thread has requests to answer."""
        with self._failing:
            if self._failure is not None or self._closing.is_set():
                return
            self._failure = reason
            self._failed.set()
            self._wake_writer.send(b"x")
        for interrupt in self._interrupts:
            interrupt_beside(interrupt)

    def _watch(self) -> None:
        interval_s = heartbeat_interval_s(self._timeout_s)
        next_heartbeat_s = 0.0
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_reader, selectors.EVENT_READ)
            for follower in self._followers.values():
                selector.register(follower.frames, selectors.EVENT_READ, follower)
            while not self._closing.is_set() and self._failure is None:
                ready = [key.data for key, _ in selector.select(interval_s / 2) if key.data is not None]
                now = time.monotonic()
                problem = self._read_frames(ready, now) or self._overdue(now)
                if problem is None and now >= next_heartbeat_s:
                    next_heartbeat_s = now + interval_s
                    problem = self._send_heartbeats()
                if problem is not None:
                    self._fail(problem)
        if self._failure is not None:
            self._on_failure(self._failure)

    def _read_frames(self, ready: list[_Follower], now: float) -> str | None:
        for follower in ready:
            try:
                for frame in follower.frames.receive_ready():
                    problem = self._take(follower, frame)
                    if problem is not None:
                        return problem
            except (PeerClosed, PeerSilent) as error:
                return f"{follower.name} died: {error}"
            except ProtocolError as error:
                return f"{follower.name} sent what is no message of ours: {error}"
            follower.last_heard_s = now
        return None

    def _take(self, follower: _Follower, frame: Frame) -> str | None:
        if frame.kind is FrameKind.HEARTBEAT and len(frame.body) == PROGRESS.size:
            follower.begun, follower.finished = PROGRESS.unpack(frame.body)
        elif frame.kind is FrameKind.FACTS:
            follower.facts.put(frame.body)
        elif frame.kind is FrameKind.REPORT and self._on_report is not None:
            self._on_report(follower.rank, frame.body)
        elif frame.kind is FrameKind.FAULT:
            return f"{follower.name} failed: {frame.body[:2000].decode('utf-8', 'replace')}"
        else:
            return f"{follower.name} sent an unexpected {frame.kind.name} message"
        return None

    def _overdue(self, now: float) -> str | None:
        if (limit := self._limit) is not None and now > limit[0]:
            return limit[1]
        waited_s = now - self._step_sent_at_s
        for follower in self._followers.values():
            silent_s = now - follower.last_heard_s
            if silent_s > self._timeout_s:
                return f"{follower.name} has been silent for {silent_s:.1f} s (limit {self._timeout_s:g} s)"
            if follower.begun < self._steps_sent and waited_s > self._timeout_s:
                return (
                    f"{follower.name} is alive but has not begun step {self._steps_sent} after "
                    f"{waited_s:.1f} s (limit {self._timeout_s:g} s)"
                )
        num_open = self._num_steps_open
        if self._has_step_limit and num_open and waited_s > self._timeout_s:
            return (
                f"rank 0 has been in step {self._steps_sent - num_open + 1} for {waited_s:.1f} s (limit "
                f"{self._timeout_s:g} s): a rank hangs in a collective"
            )
        return None

    def _send_heartbeats(self) -> str | None:
        for follower in self._followers.values():
            try:
                follower.frames.send_if_idle(FrameKind.HEARTBEAT)
            except PeerClosed:
                return self._last_words(follower)
            except PeerSilent as error:
                return f"{follower.name} died: {error}"
        return None

    def _last_words(self, follower: _Follower) -> str:
        """Why a follower has closed its connection, if it said so before; reading does not wait any more."""
        while True:
            problem = self._read_frames([follower], time.monotonic())
            if problem is not None:
                return problem
