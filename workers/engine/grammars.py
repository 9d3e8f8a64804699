"""Grammars that answers must follow: compiled beside the engine's thread, masks filled beside its steps.

    want(sequences) -> [ compile thread ] -> collect(): the sequences get their states, or the request ends
    start(sequences, slices) -> [ mask thread ] -> bits(), as the sampler asks for them

A request waits in its place in the queue while its grammar is compiled, and is passed over until then. What
has been compiled, or refused, is remembered. A state goes forward token by token with its sequence and
outlives a preemption; a choice that another group has begun is replayed from its tokens.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from workers.engine.masks import GrammarCursor, GrammarState, Masks
from workers.engine.step import SequenceSlice
from workers.types import INVALID_GRAMMAR, TOO_BUSY, Grammar, RequestRefused

if TYPE_CHECKING:
    from workers.engine.request import RequestState
    from workers.engine.sequence import Sequence as EngineSequence

COMPILE_TIMEOUT_S = 5.0
_COMPILE_THREADS = 2  # one slow grammar does not hold up all others
_MAX_PENDING = 256  # different grammars that are being compiled or wait for it
_MAX_KEPT = 64  # compiled grammars
_MAX_KEPT_BYTES = 768 << 20  # that they may come to take together; the newest one is kept in any case

_log = logging.getLogger(__name__)


class GrammarRefused(Exception):
    """A grammar that cannot be compiled, or not within the limits."""

    def __init__(self, message: str, *, code: str = INVALID_GRAMMAR) -> None:
        super().__init__(message)
        self.message = message
        self.code = code

    @property
    def sentence(self) -> str:
        """For the client."""
        is_grammar = self.code == INVALID_GRAMMAR
        return f"The grammar of this request cannot be used: {self.message}." if is_grammar else self.message


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerEnd:
    """How an answer may end, besides its grammar."""

    token_ids: tuple[int, ...]  # allowed where the grammar may end, and nowhere else unless it has them
    min_tokens: int  # they are not, before so many; but where nothing else can follow, the answer ends


class CompiledGrammar(Protocol):
    """A grammar that any number of answers can follow."""

    @property
    def num_bytes(self) -> int:
        """Memory that it may come to take, about, as answers follow it."""
        ...

    def begin(self, end: AnswerEnd, output: Sequence[int]) -> GrammarState:
        """For an answer that has these tokens already. Raises GrammarRefused when they do not fit."""
        ...


class GrammarBackend(Protocol):
    """Compiles; called in threads of `Grammars`."""

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Raises GrammarRefused. Must let other threads run."""
        ...


@dataclass(slots=True)
class _Waiting:
    sequences: list[EngineSequence]
    grammar: Grammar
    since_s: float


class Grammars:
    """Of one engine. The engine's thread calls everything."""

    def __init__(self, backend: GrammarBackend | None, clock: Callable[[], float]) -> None:
        """backend None: requests with a grammar are refused. clock: monotonic seconds."""
        self._backend = backend
        self._clock = clock
        self.on_news: Callable[[], None] = lambda: None  # called in a compile thread
        self.has_news = False  # collect() has something to do
        self._kept: OrderedDict[Grammar, CompiledGrammar | GrammarRefused] = OrderedDict()  # newest last
        self._compiling: dict[Grammar, Future[CompiledGrammar]] = {}
        self._began_s: dict[Grammar, float] = {}  # of those, for which a thread has begun
        self._waiting: list[_Waiting] = []
        self._compilers: ThreadPoolExecutor | None = None  # threads once they are needed
        self._masks = Masks()

    @property
    def num_waiting(self) -> int:
        """Requests whose grammars are being compiled."""
        return len(self._waiting)

    def check(self, grammar: Grammar) -> None:
        """Raises RequestRefused when it is known already that a request cannot have it."""
        if self._backend is None:
            raise RequestRefused(
                "Answers cannot follow a grammar here: the package llguidance is not installed on the "
                "machine of this worker group.",
                code="unsupported_parameter",
            )
        known = self._kept.get(grammar)
        if isinstance(known, GrammarRefused):
            raise RequestRefused(known.sentence, code=known.code)
        is_new = known is None and grammar not in self._compiling
        if is_new and len(self._compiling) >= _MAX_PENDING:
            raise RequestRefused(
                f"{_MAX_PENDING} grammars are waiting to be compiled. Try again later.", code=TOO_BUSY
            )

    def want(self, sequences: list[EngineSequence], grammar: Grammar) -> None:
        """The sequences of one request, which check() has let through, are to follow this grammar."""
        assert self._backend is not None
        waiting = _Waiting(sequences, grammar, self._clock())
        sequences[0].parent.awaits_grammar = True
        if (known := self._kept.get(grammar)) is not None:
            self._kept.move_to_end(grammar)
            self.has_news = True
        elif grammar not in self._compiling:
            if self._compilers is None:
                self._compilers = ThreadPoolExecutor(_COMPILE_THREADS, "grammar-compile")
            future = self._compiling[grammar] = self._compilers.submit(self._compile, self._backend, grammar)
            future.add_done_callback(self._compiled)
        assert not isinstance(known, GrammarRefused)
        self._waiting.append(waiting)

    def collect(self) -> list[tuple[EngineSequence, GrammarRefused]]:
        """Gives sequences the states that are ready; returns one of each request that cannot have any."""
        if not (self.has_news or self._waiting or self._compiling):
            return []
        has_news, self.has_news = self.has_news, False
        uncertain = self._keep_compiled()
        refused: list[tuple[EngineSequence, GrammarRefused]] = []
        left: list[_Waiting] = []
        for waiting in self._waiting:
            parent = waiting.sequences[0].parent
            known = self._kept.get(waiting.grammar)
            try:
                if known is None:
                    self._check_overdue(waiting)
                    left.append(waiting)
                elif isinstance(known, GrammarRefused):
                    refused.append((waiting.sequences[0], known))
                else:
                    _attach(known, waiting.sequences)
                    parent.awaits_grammar = False
            except GrammarRefused as error:
                refused.append((waiting.sequences[0], error))
        self._waiting = left
        for grammar in uncertain:
            del self._kept[grammar]
        if has_news:
            self._forget()
        return refused

    def start(self, sequences: Sequence[EngineSequence], slices: Sequence[SequenceSlice]) -> None:
        """Has the masks filled for what the step samples: a slice for each of the sequences, in order, and
        after each of its drafts. Slices after these are of searches, which follow no grammar."""
        work = [
            (sequence.grammar, piece.drafts)
            for sequence, piece in zip(sequences, slices, strict=False)
            if sequence.grammar is not None and piece.sample is not None
        ]
        if work:
            self._masks.fill(work)

    def drop(self, parent: RequestState) -> None:
        """A request has ended that was waiting for its grammar, which is not compiled any more: unless that
        has begun, or others wait for it."""
        grammar = parent.request.grammar
        assert grammar is not None
        self._waiting = [each for each in self._waiting if each.sequences[0].parent is not parent]
        future = self._compiling.get(grammar)
        is_wanted = any(each.grammar == grammar for each in self._waiting)
        if future is not None and not is_wanted and future.cancel():
            del self._compiling[grammar]

    def close(self) -> None:
        """Ends the threads once they have done what they are at. May be called twice; nothing else may be
        called afterwards."""
        self._masks.close()
        if self._compilers is not None:
            self._compilers.shutdown(wait=False, cancel_futures=True)

    def _compiled(self, _future: Future[CompiledGrammar]) -> None:
        self.has_news = True
        self.on_news()

    def _keep_compiled(self) -> list[Grammar]:
        """Returns those that may be good another time: not to be remembered."""
        uncertain = []
        for grammar, future in list(self._compiling.items()):
            if not future.done():
                continue
            del self._compiling[grammar]
            self._began_s.pop(grammar, None)
            if future.cancelled():
                continue
            error = future.exception()
            if error is not None and not isinstance(error, GrammarRefused):
                _log.error("a grammar fails to compile", exc_info=error)
                error = GrammarRefused(f"it could not be compiled ({type(error).__name__})")
            self._kept[grammar] = future.result() if error is None else error
            if error is not None and error.code == TOO_BUSY:
                uncertain.append(grammar)
        return uncertain

    def _forget(self) -> None:
        """The oldest ones that are too many, or too large together."""
        num_bytes = sum(_num_bytes(*entry) for entry in self._kept.items())
        while len(self._kept) > _MAX_KEPT or (num_bytes > _MAX_KEPT_BYTES and len(self._kept) > 1):
            num_bytes -= _num_bytes(*self._kept.popitem(last=False))

    def _check_overdue(self, waiting: _Waiting) -> None:
        """Raises GrammarRefused when a request has waited for too long."""
        began_s = self._began_s.get(waiting.grammar)
        since_s = waiting.since_s if began_s is None else began_s
        if self._clock() - since_s <= COMPILE_TIMEOUT_S:
            return
        if began_s is not None:
            raise GrammarRefused(
                f"it is not compiled after {COMPILE_TIMEOUT_S:g} s: make it smaller, or try again later if "
                "the machine of this worker group is busy"
            )
        future = self._compiling.get(waiting.grammar)
        if future is None or future.cancel():
            self._compiling.pop(waiting.grammar, None)
            raise GrammarRefused("Too many grammars are being compiled. Try again later.", code=TOO_BUSY)

    def _compile(self, backend: GrammarBackend, grammar: Grammar) -> CompiledGrammar:
        """In a compile thread."""
        self._began_s[grammar] = self._clock()
        return backend.compile(grammar)


def _num_bytes(grammar: Grammar, compiled: CompiledGrammar | GrammarRefused) -> int:
    """Memory that it may come to take to keep it, about."""
    return len(grammar.text) + (0 if isinstance(compiled, GrammarRefused) else compiled.num_bytes)


def _attach(grammar: CompiledGrammar, sequences: list[EngineSequence]) -> None:
    for sequence in sequences:
        parent = sequence.parent
        end = AnswerEnd(
            token_ids=tuple(sorted(parent.end_ids)), min_tokens=parent.request.sampling.min_tokens
        )
        sequence.grammar = GrammarCursor(_begin(grammar, end, sequence.output))
        assert sequence.task is not None
        sequence.task = replace(sequence.task, allowed=sequence.grammar)


def _begin(grammar: CompiledGrammar, end: AnswerEnd, output: Sequence[int]) -> GrammarState:
    try:
        return grammar.begin(end, output)
    except (GrammarRefused, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # as in `masks`
        _log.exception("an answer cannot begin its grammar")
        raise GrammarRefused(f"no answer can begin with it ({type(error).__name__})") from error
