"""Threads for rendering and tokenizing, so that neither ever stands on the event loop.

Long calls have all threads but one: a short one never waits for several of them. A call that exceeds its time
is given up: its thread cannot be stopped, so another takes its place, and the old one ends when its call
does. All threads are daemons: none keeps the process alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, Protocol, TypeVar, cast

Result = TypeVar("Result")

_MAX_QUEUE_S = 60.0  # a call not even begun after this is given up as well


class TextTimeout(Exception):
    """A call took longer than its time."""


class TextBusy(Exception):
    """A call was not even begun: the threads have too much to do."""


class _Job(Protocol):
    def run(self) -> bool: ...


class TextWorkers:
    """A fixed number of threads that run short functions."""

    def __init__(self, num_threads: int, *, max_calls: int, max_queue_s: float = _MAX_QUEUE_S) -> None:
        """At most `max_calls` run or wait for a thread."""
        self._max_calls = max_calls
        self._num_calls = 0
        self._max_queue_s = max_queue_s
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._num_threads = num_threads
        self._long = asyncio.Semaphore(max(1, num_threads - 1))
        self.num_replaced = 0
        for _ in range(num_threads):
            self._start_thread()

    async def run(
        self,
        function: Callable[[], Result],
        timeout_s: float,
        *,
        extra_s: Callable[[], float] = lambda: 0.0,
        is_long: bool = False,
    ) -> Result:
        """The function's result or exception. Raises TextTimeout after `timeout_s` of running, and as much
        more as `extra_s` says by then; TextBusy when there are too many calls, or it has not begun after
        `max_queue_s`. `is_long`: it takes a good part of a second or more."""
        if self._num_calls >= self._max_calls:
            raise TextBusy(f"{self._num_calls} calls run or wait, which is the limit")
        self._num_calls += 1
        try:
            if not is_long:
                return await self._run(function, timeout_s, extra_s)
            await self._wait_for_place()
            try:
                return await self._run(function, timeout_s, extra_s)
            finally:
                self._long.release()
        finally:
            self._num_calls -= 1

    async def _wait_for_place(self) -> None:
        try:
            async with asyncio.timeout(self._max_queue_s):
                await self._long.acquire()
        except TimeoutError:
            raise TextBusy(f"not begun within {self._max_queue_s:g} s") from None

    async def _run(
        self, function: Callable[[], Result], timeout_s: float, extra_s: Callable[[], float]
    ) -> Result:
        call = _Call(function, asyncio.get_running_loop())
        self._jobs.put(call)
        queued_at = time.monotonic()
        try:
            left_s = timeout_s
            while True:
                await asyncio.wait((call.future,), timeout=left_s)
                if call.future.done():
                    return call.future.result()
                if call.begun_at is None:
                    if time.monotonic() - queued_at > self._max_queue_s:
                        raise TextBusy(f"not begun within {self._max_queue_s:g} s")
                    continue
                limit_s = timeout_s + extra_s()
                left_s = call.begun_at + limit_s - time.monotonic()
                if left_s <= 0.0:
                    call.replaced = True
                    self.num_replaced += 1
                    self._start_thread()
                    raise TextTimeout(f"longer than {limit_s:g} s")
        finally:
            call.given_up = True

    def close(self) -> None:
        """Ends the threads once they have nothing to do."""
        for _ in range(self._num_threads):
            self._jobs.put(None)

    def _start_thread(self) -> None:
        threading.Thread(target=self._work, name="tandem-text", daemon=True).start()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None and job.run():
            pass


class _Call(Generic[Result]):
    """One call on its way through a thread. `given_up`: nobody waits for it any more."""

    def __init__(self, function: Callable[[], Result], loop: asyncio.AbstractEventLoop) -> None:
        self._function = function
        self._loop = loop
        self.future: asyncio.Future[Result] = loop.create_future()
        self.begun_at: float | None = None
        self.given_up = False
        self.replaced = False  # another thread has taken the place of the one that runs this

    def run(self) -> bool:
        """In a worker thread. Whether that thread should go on."""
        if self.given_up:
            return True
        self.begun_at = time.monotonic()
        failure: BaseException | None = None
        result: Result | None = None
        try:
            result = self._function()
        except BaseException as error:
            failure = error

        def answer() -> None:
            if self.future.done() or self.given_up:
                return
            if failure is not None:
                self.future.set_exception(failure)
            else:
                self.future.set_result(cast(Result, result))

        # A loop that has ended has nobody waiting.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(answer)
        return not self.replaced
