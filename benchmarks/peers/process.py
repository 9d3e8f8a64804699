"""The parent's side of a peer: a child process in the peer's environment, JSON lines over its pipes.

Between works the child waits for a line and uses no core. What it logs goes to a file beside its converted
models; errors name that file.
"""

from __future__ import annotations

import hashlib
import json
import os
import selectors
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import benchmarks
from benchmarks.peers.catalogue import PeerKind
from benchmarks.subjects import Prompts, SubjectFailed

_LOAD_TIMEOUT_S = 900.0  # converts the model once
_WORK_TIMEOUT_S = 600.0
_STOP_TIMEOUT_S = 10.0


class PeerProcess:
    """A peer with one model in one weight format. A context manager would hide when it ends: call close."""

    def __init__(self, kind: PeerKind, root: Path, folder: Path, weights: str, threads: int) -> None:
        """Starts it and waits until the model is loaded. Raises SubjectFailed."""
        label = kind.labels[weights]
        mark = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:8]
        cache = root / "models" / f"{folder.name}-{mark}" / kind.name
        cache.mkdir(parents=True, exist_ok=True)
        self._label = label
        self._log = cache / f"{weights}.log"
        # The package of this file, whatever the working folder is; the peer's program imports only that.
        path = str(Path(benchmarks.__file__).parent.parent)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*kind.program(root), str(folder), weights, str(cache), str(threads)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**kind.environment(), "PYTHONPATH": path, "OMP_NUM_THREADS": str(threads)},
            )
        self._buffer = b""
        try:
            self.version = str(self._read("ready", _LOAD_TIMEOUT_S))
        except SubjectFailed:
            self.close()
            raise

    def generate(self, prompts: Prompts, new_tokens: int) -> float:
        return self._ask({"do": "generate", "prompts": prompts, "new_tokens": new_tokens})

    def after_beginning(self, beginning: Sequence[int], prompt: Sequence[int]) -> float:
        return self._ask({"do": "after_beginning", "beginning": beginning, "prompt": prompt})

    def close(self) -> None:
        """Ends the child; may be called twice."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(_STOP_TIMEOUT_S)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait(_STOP_TIMEOUT_S)

    def _ask(self, order: dict[str, object]) -> float:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failed("it has ended") from None
        return float(self._read("seconds", _WORK_TIMEOUT_S))

    def _read(self, key: str, timeout_s: float) -> Any:
        """The value of `key` in the next line."""
        message = json.loads(self._line(timeout_s))
        if "error" in message:
            raise self._failed(str(message["error"]))
        return message[key]

    def _line(self, timeout_s: float) -> bytes:
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(max(deadline - time.monotonic(), 0)):
                    raise self._failed(f"no answer within {timeout_s:g} s")
                piece = os.read(self._process.stdout.fileno(), 1 << 16)
                if not piece:
                    raise self._failed("it ended without an answer")
                self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _failed(self, reason: str) -> SubjectFailed:
        return SubjectFailed(f"{self._label}: {reason} (its log: {self._log})")
