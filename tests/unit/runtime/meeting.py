"""Agreements of ranks that are threads of one process: what their links do."""

from __future__ import annotations

from collections.abc import Callable
from queue import Queue

from workers.runtime.agreement import Decide
from workers.runtime.handshake import Facts

PATIENCE_S = 20.0
# What is said of rank 0's memory, that is not so, and why it is refused.
WRONG_PLACES = [
    ("label", "00" * 32, "the memory that was found is not that of rank 0"),
    ("path", "/proc/1/fd/999999", "No such file or directory"),
    ("path", "/etc/passwd", "'/etc/passwd' is no memory of a process"),
]


class Meeting:
    """Of `size` ranks."""

    def __init__(self, size: int, change: Callable[[Facts], Facts] = lambda facts: facts) -> None:
        """change: what happens to agreed facts on their way."""
        self._facts: Queue[tuple[int, Facts]] = Queue()
        self._answers: list[Queue[Facts]] = [Queue() for _ in range(size)]
        self._change = change

    def decide(self, own: Facts, decide: Decide) -> Facts:
        """Rank 0's side."""
        others = dict(self._facts.get(timeout=PATIENCE_S) for _ in self._answers[1:])
        agreed = decide({0: own, **{rank: others[rank] for rank in sorted(others)}})
        for answers in self._answers[1:]:
            answers.put(self._change(agreed))
        return agreed

    def tell(self, rank: int, own: Facts) -> Facts:
        self._facts.put((rank, own))
        return self._answers[rank].get(timeout=PATIENCE_S)
