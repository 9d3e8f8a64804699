"""Compiles grammars with llguidance, within limits.

What a hostile grammar can cost: compiling is bounded by the size of its text, by llguidance's limits, by
those of the process in which it is tried first (see `trial`), and by the deadline of
`workers.engine.grammars`; each token by the limits of a step and the budget of an answer (see `matching`).
Memory: what is compiled, and the states of a lexer, which the answers of a grammar share.
"""

from __future__ import annotations

import re
import threading
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from workers.engine.grammars import GrammarRefused
from workers.engine.step import GrammarFailed
from workers.structured.matching import LlguidanceGrammar
from workers.structured.source import source_of
from workers.structured.trial import Trials
from workers.structured.vocabulary import VocabularyUnknown, read_vocabulary
from workers.types import Grammar, GrammarKind

_MAX_LEXER_STATES = 20_000  # of a grammar, for all its answers; they are made as tokens are looked at
# Measured with llguidance 1.9 over schemas, choices, expressions and grammars of 60 kB: at most.
_BYTES_OF_SOURCE = 100  # of a compiled grammar, for each of its text
_BYTES_OF_STATE = 1200
_MAX_MESSAGE = 500
_PLACE = re.compile(r"(?:at )?(\d+)\(\d+\): ")


class LlguidanceBackend:
    """Implements `workers.engine.grammars.GrammarBackend`. Of one model; any thread may use it."""

    def __init__(self, folder: str | Path, vocab_size: int) -> None:
        """folder: of the checkpoint. Reads nothing yet."""
        self._folder = folder
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | str | None = None  # a text: why there is none
        self._trials = Trials(folder, vocab_size, _MAX_LEXER_STATES)

    def warm(self) -> None:
        """Reads the vocabulary, which otherwise happens with the first grammar and holds the interpreter for
        a second or two."""
        with self._lock:
            if self._tokenizer is None:
                try:
                    self._tokenizer = read_vocabulary(self._folder, self._vocab_size)
                except VocabularyUnknown as error:
                    self._tokenizer = str(error)
                else:
                    self._trials.start()

    def compile(self, grammar: Grammar) -> LlguidanceGrammar:
        """Blocks, and lets other threads run. Raises GrammarRefused."""
        self.warm()
        if not isinstance(self._tokenizer, LLTokenizer):
            raise GrammarRefused(
                f"This model's answers cannot follow a grammar: {self._tokenizer}.",
                code="unsupported_parameter",
            )
        source = source_of(grammar)
        verdict = self._trials.verdict_on(source)
        if verdict.problem:
            raise GrammarRefused(_message(verdict.problem, grammar.kind))
        tokenizer = self._tokenizer

        def make() -> LLMatcher:
            limits = LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)
            matcher = LLMatcher(tokenizer, source, log_level=0, limits=limits)
            if matcher.is_error():
                raise GrammarRefused(_message(matcher.get_error(), grammar.kind))
            return matcher

        num_bytes = (
            max(_BYTES_OF_SOURCE * len(source), verdict.num_bytes) + _BYTES_OF_STATE * _MAX_LEXER_STATES
        )
        try:
            return LlguidanceGrammar(make, self._vocab_size, num_bytes)
        except GrammarFailed as error:
            raise GrammarRefused(_message(f"no answer can follow it: {error}", grammar.kind)) from None


def _message(problem: str, kind: GrammarKind) -> str:
    """One line, without the source that llguidance repeats below its message. Line numbers are of the
    grammar's own text, and left out where that is no grammar."""
    if (place := _PLACE.match(problem)) is not None:
        line = f"line {int(place[1]) - 1}: " if kind is GrammarKind.LARK else ""
        problem = line + problem[place.end() :]
    words = problem.partition("\n   1 | ")[0].replace("<non-verbose/>", "").split()
    return " ".join(words)[:_MAX_MESSAGE]
