"""Virtual time: events in order, and nothing between them."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class World:
    """Events of one moment happen in the order in which they were asked for, so every run is the same."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_events = 0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, when_s: float, action: Callable[[], None]) -> None:
        """Has something happen at a time that has not passed."""
        assert when_s >= self.now_s, f"{when_s} has passed: it is {self.now_s}"
        self.num_events += 1
        heapq.heappush(self._queue, (when_s, self.num_events, action))

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Has something happen later."""
        self.at(self.now_s + delay_s, action)

    def run(self) -> None:
        """Until nothing is left to happen."""
        queue = self._queue
        while queue:
            self.now_s, _, action = heapq.heappop(queue)
            action()

    def clock(self) -> float:
        """Seconds since the beginning."""
        return self.now_s
