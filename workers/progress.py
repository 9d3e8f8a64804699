"""What a program at a terminal is doing: a line when it changes, repeated while it takes long."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Self, TextIO

_REPEAT_S = 1.8  # never silent for two seconds


class Progress:
    """Lines on a stream, kept going by a thread of its own. Use as a context."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._began_at = time.monotonic()
        self._text = ""
        self._has_changed = threading.Condition()
        self._is_over = False
        self._thread = threading.Thread(target=self._repeat, name="progress", daemon=True)

    def start(self, text: str) -> None:
        """Says what is being done from now on."""
        with self._has_changed:
            self._text = text
            self._say(text)
            self._has_changed.notify()

    def end(self, text: str = "") -> None:
        """Nothing is repeated from now on; `text` is the last word."""
        with self._has_changed:
            self._text = ""
            if text:
                self._stream.write(f"{text}\n")
                self._stream.flush()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._has_changed:
            self._is_over = True
            self._has_changed.notify()
        self._thread.join(timeout=5.0)

    def _say(self, text: str) -> None:
        self._stream.write(f"{time.monotonic() - self._began_at:6.1f} s  {text}\n")
        self._stream.flush()

    def _repeat(self) -> None:
        with self._has_changed:
            while not self._is_over:
                is_new = self._has_changed.wait(_REPEAT_S)
                if not is_new and self._text:
                    self._say(f"... {self._text}")
