"""The engine's thread.

    submit, abort, exchange --> inbox --> [ drain inbox; sweep; engine.step() ]* --> on_output(StepOutput)

Between steps the thread takes all commands, and says what came of them before the step, which may be the
last; a request that is refused, and one that ends in an error, comes back as an ERROR chunk. With nothing to
compute it waits for a command or a compiled grammar without spinning, and wakes up for the timers of grammars
and of exchanges with other groups, and for the canary's prompt. It ends by stop(), or when the group cannot
compute any more: then every request it has, and every one submitted later, gets an ERROR chunk `engine_dead`;
or, when it computes wrongly, by no fault of theirs (`workers.engine.canary`), one `group_distrusted`. Each
accepted or refused choice thus gets exactly one chunk with a finish_reason.

Not covered: a step that hangs. Executors bound their waits; stop() bounds its own. What a step had found when
the engine itself failed in it is lost: the failure says that the group is.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from workers.engine.canary import Canary
from workers.engine.engine import Engine
from workers.engine.exchange import ExchangeCommand
from workers.engine.leases import LeaseId
from workers.engine.request import MAX_CHOICES
from workers.engine.step import GroupDistrusted, GroupFailed
from workers.report import GroupReport
from workers.types import (
    BlockEvent,
    FinishReason,
    GenerateRequest,
    GroupStats,
    RequestId,
    RequestRefused,
    TokenChunk,
    error_chunk,
)

_IDLE_WAIT_S = 1.0  # the longest single wait of an idle loop
_ENGINE_DEAD = "engine_dead"
_DISTRUSTED = "group_distrusted"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """What happened in a step, or between two."""

    chunks: tuple[TokenChunk, ...]
    events: tuple[BlockEvent, ...]
    stats: GroupStats
    report: GroupReport | None = None  # about once a second
    failure: str | None = None  # set once, in the last output: the group is dead


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: RequestId


_Command = GenerateRequest | _Abort | ExchangeCommand


class EngineLoop:
    """Runs an engine in a thread of its own. All methods may be called from any thread."""

    def __init__(
        self, engine: Engine, on_output: Callable[[StepOutput], None], canary: Canary | None = None
    ) -> None:
        """on_output is called in the loop's thread, first with the stats at start, then in the order of
        steps; once the loop has ended, also in the thread of a submit(). It has to be quick. If it raises,
        the loop ends: its results would be lost unseen. canary: already proven; None: there is none."""
        self._engine = engine
        self._on_output = on_output
        self._canary = canary
        self._commands: deque[_Command] = deque()
        self._changed = threading.Condition()  # guards the three below
        self._is_stopping = False
        self._closing_reason: str | None = None  # why nothing is taken any more
        self._failure: str | None = None
        self._closing_code = _ENGINE_DEAD  # not changed any more once there is a reason
        engine.on_grammar(self._wake)
        self._stats = engine.stats()  # of the last output
        self._unsaid: list[TokenChunk] = []  # for the next output, whatever happens before it
        self._thread = threading.Thread(target=self._run, name="engine-loop", daemon=True)

    @property
    def failure(self) -> str | None:
        """Why the group cannot compute any more; None while it can."""
        return self._failure

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: GenerateRequest) -> None:
        """Queues a request; whatever becomes of it comes through on_output."""
        with self._changed:
            reason = self._closing_reason
            if reason is None:
                self._commands.append(request)
                self._changed.notify()
        if reason is not None:
            chunks = tuple(_refusal(request, self._closing_code, reason))
            self._on_output(StepOutput(chunks=chunks, events=(), stats=self._stats))

    def abort(self, request_id: RequestId) -> None:
        """Ends a request before the next step; its open choices get a CANCELLED chunk. Unknown ones are
        ignored."""
        self._order(_Abort(request_id))

    def exchange(self, command: ExchangeCommand) -> None:
        """Has the engine take a command about blocks of other groups, or for them, before the next step."""
        self._order(command)

    def renew_lease(self, lease_id: LeaseId) -> None:
        """The reader of a lease lives; noted at once, whatever step the engine is in."""
        self._engine.renew_lease(lease_id)

    def stop(self, timeout_s: float) -> None:
        """Ends the thread after the step it is in, and all requests with an ERROR chunk. Returns after
        timeout_s at the latest: `is_alive` says whether a step still hangs. May be called twice."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            self._emit()
            while (commands := self._next_commands()) is not None:
                has_news = False
                for command in commands:
                    if isinstance(command, GenerateRequest):
                        self._unsaid += self._add(command)
                    elif isinstance(command, _Abort):
                        self._unsaid += self._cancel(command)
                    else:
                        self._engine.handle(command)
                        has_news = True
                if self._canary is not None and self._canary.is_due:
                    self._canary.ask(self._engine)
                if self._engine.has_timers():
                    has_news |= self._engine.sweep()
                if self._unsaid or has_news or self._engine.has_report():
                    self._emit()
                if self._engine.can_step():
                    self._step()
                    self._emit()
        except GroupFailed as error:
            self._failure = str(error)
            if isinstance(error, GroupDistrusted):
                self._closing_code = _DISTRUSTED
        except BaseException as error:  # what an extension in Rust raises when it panics is no Exception
            _log.exception("the engine loop ends")
            self._failure = f"the engine loop failed: {error!r}"
        self._close(self._failure or "The engine is stopping.")

    def _step(self) -> None:
        chunks = self._engine.step()
        if self._canary is None:
            self._unsaid += chunks
            return
        self._unsaid += self._canary.take(chunks)  # they are heard of even when the group ends by its canary
        self._canary.judge()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify()

    def _order(self, command: _Abort | ExchangeCommand) -> None:
        with self._changed:
            if self._closing_reason is None:
                self._commands.append(command)
                self._changed.notify()

    def _next_commands(self) -> list[_Command] | None:
        """Waits until there is something to do, which may be no command but a step, or a look at the timers;
        None: stop."""
        with self._changed:
            while not (self._commands or self._is_stopping or self._engine.can_step()):
                self._changed.wait(_IDLE_WAIT_S)
                if self._engine.has_timers() or self._engine.has_report() or self._is_canary_due():
                    break
            if self._is_stopping:
                return None
            commands = list(self._commands)
            self._commands.clear()
            return commands

    def _is_canary_due(self) -> bool:
        return self._canary is not None and self._canary.is_due

    def _add(self, request: GenerateRequest) -> list[TokenChunk]:
        try:
            self._engine.add(request)
        except RequestRefused as refused:
            return _refusal(request, refused.code, refused.message)
        except Exception as error:  # add() changes nothing before it has built everything
            _log.exception("request %s cannot be added", request.request_id)
            message = f"The engine could not take this request ({type(error).__name__})."
            return _refusal(request, "internal_error", message)
        return []

    def _cancel(self, command: _Abort) -> list[TokenChunk]:
        choices = self._engine.unfinished_choices(command.request_id)
        self._engine.abort(command.request_id)
        return [
            TokenChunk(request_id=command.request_id, choice=choice, finish_reason=FinishReason.CANCELLED)
            for choice in choices
        ]

    def _close(self, reason: str) -> None:
        """The last words: an error for every choice that has not ended and for what was never looked at."""
        with self._changed:
            self._closing_reason = reason
            left = [command for command in self._commands if isinstance(command, GenerateRequest)]
            self._commands.clear()
        self._unsaid += [
            error_chunk(request_id, choice, self._closing_code, reason)
            for request_id, choice in self._engine.unfinished()
            if self._canary is None or not self._canary.owns(request_id)
        ]
        for request in left:
            self._unsaid += _refusal(request, self._closing_code, reason)
        try:
            self._engine.fail_all()
        except Exception:
            # The failure may be the engine's own broken state; clients must hear of it all the same.
            _log.exception("the engine's state cannot be cleared")
        try:
            self._emit(self._failure, is_last=True)
        except Exception:
            _log.exception("nobody hears that the engine loop has ended")

    def _emit(self, failure: str | None = None, *, is_last: bool = False) -> None:
        self._stats = self._engine.stats()
        chunks, self._unsaid = tuple(self._unsaid), []
        output = StepOutput(
            chunks=chunks,
            events=tuple(self._engine.take_events()),
            stats=self._stats,
            report=None if is_last else self._engine.take_report(),  # its clock may be what is broken
            failure=failure,
        )
        self._on_output(output)


def _refusal(request: GenerateRequest, code: str, message: str) -> list[TokenChunk]:
    """One error per choice that the sender waits for."""
    if request.begun:
        return [error_chunk(request.request_id, begun.choice, code, message) for begun in request.begun]
    num = request.num_choices
    num_choices = num if type(num) is int and 1 <= num <= MAX_CHOICES else 1
    return [error_chunk(request.request_id, choice, code, message) for choice in range(num_choices)]
