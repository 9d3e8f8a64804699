"""Stop strings in a stream of text, wherever the tokens' borders are.

Text that could still become a stop string is held back; everything else passes at once. The stop string that
is complete first ends the text; of two complete at the same character, the longer one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class StopMatch(NamedTuple):
    """What to give out after some more text, and the stop string if one is complete."""

    text: str
    stop: str | None


class StopMatcher:
    """Watches the text of one choice. Cost per call is small and independent of the text so far."""

    def __init__(self, stops: Sequence[str], *, include_stop: bool) -> None:
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._held = ""
        # Last character of a held text -> the proper prefixes of stop strings that end with it, longest
        # first.
        self._prefixes: dict[str, list[str]] = {}
        for prefix in sorted(
            {stop[:n] for stop in stops for n in range(1, len(stop))}, key=len, reverse=True
        ):
            self._prefixes.setdefault(prefix[-1], []).append(prefix)

    def add(self, text: str) -> StopMatch:
        """Takes more text. After a match nothing more may be added."""
        if not text:
            return StopMatch("", None)
        seen = self._held + text
        found = self._first_complete(seen)
        if found is not None:
            stop, start = found
            self._held = ""
            return StopMatch(seen[: start + len(stop)] if self._include_stop else seen[:start], stop)
        kept = self._could_become_stop(seen)
        self._held = seen[len(seen) - kept :]
        return StopMatch(seen[: len(seen) - kept], None)

    def finish(self) -> str:
        """The held text: nothing more comes, so it is no stop string."""
        held, self._held = self._held, ""
        return held

    def _first_complete(self, seen: str) -> tuple[str, int] | None:
        best: tuple[int, int, str] | None = None  # end, start, stop
        for stop in self._stops:
            start = seen.find(stop)
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else (best[2], best[1])

    def _could_become_stop(self, seen: str) -> int:
        for prefix in self._prefixes.get(seen[-1], ()):
            if seen.endswith(prefix):
                return len(prefix)
        return 0
