"""How the commands talk: lines for people, JSON for programs, and never silence for more than two seconds.

Results go to standard output, and what is said meanwhile to standard error, also as JSON. With `--json`
standard output holds one document; of commands that tell one thing after the other, a document a line.

On a terminal the current phase stands at the bottom with a spinner and its seconds; through a pipe a line
repeats it. Colour is rich's business: none when the output is not a terminal or NO_COLOR is set.
"""

from __future__ import annotations

import errno
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.status import Status
from rich.table import Table
from rich.text import Text

from cluster.cli import tables
from cluster.cli.tables import visible
from cluster.config.problems import ConfigError
from cluster.launch.errors import LaunchError
from cluster.models.embedded import EmbeddedModelError
from cluster.running.directory_probe import ProbeError
from cluster.running.serve_api import ServeApiError

EXIT_FAILURE = 1
EXIT_BAD_CONFIG = 2
EXIT_INTERRUPTED = 130

_PIPE_WIDTH = 1000
_HEARTBEAT_S = 1.8
_PATIENT_AFTER_S = 60.0  # then a line through a pipe every
_PATIENT_HEARTBEAT_S = 10.0


class CommandFailed(RuntimeError):
    """A command cannot do what was asked; the text says what to change. Exit code 1."""


class UsageError(CommandFailed):
    """A command line that asks for something that does not exist, or for two things at once. Exit code 2, as
    of options that the parser refuses."""


class Terminal:
    """Output of one command. `as_json`: documents for programs instead of lines for people; one in all, or
    where it `has_lines`, one a line."""

    def __init__(self, *, as_json: bool = False, has_lines: bool = False) -> None:
        self.as_json = as_json
        self._has_lines = has_lines
        self._has_emitted = False
        self.out = _console()
        self.progress = _console(stderr=True)

    def emit(self, **values: Any) -> None:
        """A document on standard output; flushed, so that a reader sees it at once. Raises CommandFailed for
        numbers that JSON has no words for."""
        assert self._has_lines or not self._has_emitted, "a second document"
        typer.echo(_json(values))
        self._has_emitted = True

    def note(self, text: str, **values: Any) -> None:
        """Something said beside the result, on standard error."""
        if self.as_json:
            typer.echo(_json({**values, "message": text}), err=True)
        else:
            self.progress.print(Text(visible(text)))

    def say(self, text: str = "", *, style: str = "") -> None:
        """A line for people; dropped when programs read."""
        if not self.as_json:
            self.out.print(escape(visible(text)), style=style or None)

    def show(self, table: Table) -> None:
        """A table for people, whole at any width."""
        tables.show(self.out, table)

    def show_facts(self, facts: Mapping[str, str]) -> None:
        """Names and values for people, a line each."""
        width = max(map(len, facts), default=0)
        for name, value in facts.items():
            self.say(f"{name:<{width}}  {value}")

    def fail(self, text: str, *, code: int, **details: Any) -> typer.Exit:
        """Report a failure and give what to raise."""
        if self.as_json:
            problem = {"event": "error", "message": text, "exit_code": code, **details}
            if self._has_emitted and not self._has_lines:
                typer.echo(_json(problem), err=True)
            else:
                self.emit(**problem)
        else:
            errors = _console(stderr=True)
            errors.print(Text("error: ", style="bold red") + Text(visible(text)))
        return typer.Exit(code)

    @contextmanager
    def exit_codes(self) -> Iterator[None]:
        """Turn the exceptions that are the caller's business into one message and an exit code."""
        try:
            yield
        except ConfigError as error:
            if self.as_json:
                lines = [problem.render() for problem in error.problems]
                raise self.fail(
                    "the configuration has mistakes", code=EXIT_BAD_CONFIG, problems=lines
                ) from error
            errors = _console(stderr=True)
            for problem in error.problems:
                errors.print(Text(visible(problem.render())))
            raise typer.Exit(EXIT_BAD_CONFIG) from error
        except UsageError as error:
            raise self.fail(str(error), code=EXIT_BAD_CONFIG) from error
        except (LaunchError, ServeApiError, EmbeddedModelError, ProbeError, CommandFailed) as error:
            raise self.fail(str(error), code=EXIT_FAILURE) from error
        except OSError as error:
            if error.errno == errno.EPIPE:  # the reader of our output has left
                raise
            place = f"{error.filename}: " if error.filename else ""
            raise self.fail(f"{place}{error.strerror or error}", code=EXIT_FAILURE) from error
        except UnicodeEncodeError as error:  # of bytes on the command line that are no text
            said = str(error.object)[max(0, error.start - 20) : error.end + 20]
            raise self.fail(f"{said!r} is no text in UTF-8", code=EXIT_FAILURE) from error
        except KeyboardInterrupt:
            raise self.fail("interrupted", code=EXIT_INTERRUPTED) from None


def _json(values: Mapping[str, Any]) -> str:
    try:
        return json.dumps(values, ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise CommandFailed(f"the result cannot be said in JSON: {error}") from error


def _console(*, stderr: bool = False) -> Console:
    """Lines are never wrapped, and tables not cut to 80 columns, where no terminal sets a width."""
    console = Console(stderr=stderr, highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    return console


@dataclass(slots=True)
class _Phase:
    text: str
    started: float


@contextmanager
def waiting(terminal: Terminal, text: str) -> Iterator[None]:
    """Around what is mostly quick: something is only said when it lasts."""
    with Phases(terminal, is_quiet=True) as phases:
        phases.start(text)
        yield


class Phases:
    """The phases of something that takes a while. Use as a context; `start` ends the phase before.
    `is_quiet`: a phase is told when it lasts, not when it begins."""

    def __init__(
        self,
        terminal: Terminal,
        *,
        is_quiet: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._terminal = terminal
        self._is_quiet = is_quiet
        self._clock = clock
        self._began = clock()
        self._current: _Phase | None = None
        self._last_line = self._began
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._heart = threading.Thread(target=self._run, name="phases", daemon=True)
        self._status: Status | None = None

    @property
    def elapsed_s(self) -> float:
        """Seconds since the first phase could start."""
        return self._clock() - self._began

    def __enter__(self) -> Phases:
        console = self._terminal.progress
        if console.is_terminal and not self._terminal.as_json:
            self._status = console.status(_Elapsed(self), spinner="dots")
            if not self._is_quiet:
                self._status.start()
                return self
        self._heart.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        if self._heart.is_alive():
            self._heart.join(timeout=5.0)
        if self._status is not None:
            self._status.stop()

    def start(self, text: str) -> None:
        """Say what is being done now."""
        with self._lock:
            self._current = _Phase(text, self._clock())
        if self._is_quiet:
            self._last_line = self._clock()
        else:
            self._line(text)

    def current(self) -> tuple[str, float]:
        """The phase under way and its seconds."""
        with self._lock:
            if self._current is None:
                return "", 0.0
            return self._current.text, self._clock() - self._current.started

    def beat(self) -> None:
        """Repeat the phase under way when nothing has been said for a while."""
        text, phase_s = self.current()
        pause = _HEARTBEAT_S if phase_s < _PATIENT_AFTER_S else _PATIENT_HEARTBEAT_S
        if not text or self._clock() - self._last_line < pause:
            return
        if self._status is not None:
            self._status.start()  # of a quiet one; once
        else:
            self._line(f"... {text} ({phase_s:.0f} s)")

    def _line(self, text: str) -> None:
        self._last_line = self._clock()
        if self._terminal.as_json:
            self._terminal.note(text, event="phase", elapsed_s=round(self.elapsed_s, 2))
        else:
            self._terminal.progress.print(
                Text(f"{self.elapsed_s:6.1f} s  ", style="dim") + Text(visible(text))
            )

    def _run(self) -> None:
        while not self._ended.wait(0.1):
            self.beat()


class _Elapsed:
    """The spinner's text, made anew at each refresh."""

    def __init__(self, phases: Phases) -> None:
        self._phases = phases

    def __rich__(self) -> Text:
        text, phase_s = self._phases.current()
        return Text(f"{visible(text)}  {phase_s:.1f} s" if text else "")
