"""Grammars are compiled in a process of their own first, which can be ended.

llguidance has limits, but not everywhere: of a JSON schema of 1 kB with `allOf` over two dozen patterns it
computes for hours, with GBs of memory, and no thread can be stopped. What a process has compiled in two
seconds and half a GB is compiled again where it is used, in a few milliseconds mostly; a process that has not
is gone, and the next grammar gets another.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import IO, NamedTuple

from workers.engine.grammars import GrammarRefused
from workers.types import TOO_BUSY

_PROGRAM = Path(__file__).with_name("trial_process.py")
_MAX_CPU_S = 2  # of the process; the system counts whole seconds, so up to one more
_MAX_MEMORY_BYTES = 512 << 20  # address space, beside that of Python and the vocabulary
# Of it, llguidance takes more the longer the chains of rules are. Threads have 8 MB, or 2 where the system
# sets no limit, and one without stack ends its whole process.
_MAX_STACK_BYTES = 1 << 20
_MAX_WAIT_S = 20.0  # where the machine is so busy that the process hardly runs

_log = logging.getLogger(__name__)


class Verdict(NamedTuple):
    """What the trial of a grammar has shown."""

    problem: str  # what is wrong with it; empty when it is good
    num_bytes: int  # of memory that it takes, as far as it went


class Trials:
    """As many processes as there are grammars at the same time; they stay for the next ones. Any thread may
    use it."""

    def __init__(self, folder: str | Path, vocab_size: int, max_lexer_states: int) -> None:
        """folder: of the checkpoint, whose vocabulary is known to be readable."""
        self._arguments = (str(Path(folder).absolute()), vocab_size)
        self._max_lexer_states = max_lexer_states
        self._idle: list[_Process] = []
        weakref.finalize(self, _end_all, self._idle)

    def start(self) -> None:
        """The first process, so that no grammar waits for it."""
        try:
            self._idle.append(self._new())
        except OSError as error:  # clients hear of it with their grammars
            _log.warning("no process could be started to compile grammars: %s", error)

    def verdict_on(self, source: str) -> Verdict:
        """On a grammar in llguidance's language. Blocks. Raises GrammarRefused for one that takes too much,
        and when it cannot be told now."""
        try:
            process = self._take()
        except OSError as error:
            _log.warning("no process could be started to compile a grammar: %s", error)
            raise GrammarRefused(
                f"No process could be started to compile this request's grammar ({error}). Try again later.",
                code=TOO_BUSY,
            ) from None
        try:
            verdict = process.verdict_on(source)
        except BaseException:
            process.end()
            raise
        self._idle.append(process)
        return verdict

    def _new(self) -> _Process:
        """Raises OSError."""
        return _Process(self._arguments, self._max_lexer_states)

    def _take(self) -> _Process:
        """One that waits; those that have ended meanwhile say nothing of any grammar. Raises OSError."""
        while True:
            try:
                process = self._idle.pop()
            except IndexError:
                return self._new()
            if process.is_alive:
                return process
            process.end()


class _Process:
    """One process; it ends when its input does, and so with this one."""

    def __init__(self, vocabulary: tuple[str, int], max_lexer_states: int) -> None:
        numbers = (*vocabulary, _MAX_CPU_S, _MAX_MEMORY_BYTES, _MAX_STACK_BYTES, max_lexer_states)
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_PROGRAM), *map(str, numbers)],  # -P: no import from its own folder
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        try:
            self._exchange(None)
        except EOFError:
            self.end()
            raise OSError(f"{_PROGRAM} ended at once (code {self._process.returncode})") from None

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def verdict_on(self, source: str) -> Verdict:
        """See Trials. Raises GrammarRefused; then the process has ended, or must be."""
        try:
            num_bytes, _, problem = self._exchange(source.encode()).partition(" ")
            return Verdict(problem, int(num_bytes))
        except (EOFError, BrokenPipeError):
            pass
        self.end()
        if self._process.returncode == -signal.SIGXCPU:
            raise GrammarRefused(f"it takes more than {_MAX_CPU_S} s to compile: make it smaller")
        if self._process.returncode == -signal.SIGSEGV:
            raise GrammarRefused("its rules are nested too deeply: make it flatter")
        if self._process.returncode == -signal.SIGKILL:  # by the timer below, or by the system
            raise GrammarRefused(
                "This request's grammar could not be compiled: the machine is too busy. Try again later.",
                code=TOO_BUSY,
            )
        raise GrammarRefused(f"it takes more than {_MAX_MEMORY_BYTES >> 20} MB to compile: make it smaller")

    def end(self) -> None:
        """Closes the pipes and waits. May be called twice."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:  # with something unsaid
                continue
        try:
            self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_MAX_WAIT_S)

    def _exchange(self, content: bytes | None) -> str:
        """Says something and gives the answer. Raises EOFError or BrokenPipeError when the process ends."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        timer = threading.Timer(_MAX_WAIT_S, self._process.kill)
        timer.start()
        try:
            if content is not None:
                stdin.write(len(content).to_bytes(4) + content)
                stdin.flush()
            size = int.from_bytes(_read(stdout, 4))
            return _read(stdout, size).decode()
        finally:
            timer.cancel()


def _read(pipe: IO[bytes], size: int) -> bytes:
    content = pipe.read(size)
    if len(content) < size:
        raise EOFError
    return content


def _end_all(processes: list[_Process]) -> None:
    while processes:
        processes.pop().end()
