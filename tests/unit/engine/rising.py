"""Grammars without llguidance: rising tokens of one residue class, compiled at once or when told."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace

from tests.unit.engine.toy import VOCAB, Transcript, make_engine
from workers.engine.engine import Engine
from workers.engine.grammars import AnswerEnd, GrammarRefused
from workers.engine.step import GrammarFailed
from workers.types import (
    GenerateRequest,
    Grammar,
    GrammarKind,
)

EOS = 96


class Rising:
    """Tokens of one residue class only, `most` of them. Implements CompiledGrammar and GrammarState."""

    def __init__(self, modulus: int, most: int, end: AnswerEnd | None = None) -> None:
        self.modulus, self.most, self.end = modulus, most, end
        self.output: list[int] = []
        self.rows: list[bytes] = []
        self.cost_s = 0.0
        self.num_bytes = 1000
        self.fails_after: int | None = None

    def begin(self, end: AnswerEnd, output: Sequence[int]) -> Rising:
        state = Rising(self.modulus, self.most, end)
        state.fails_after = self.fails_after
        state.cost_s = self.cost_s
        if state.num_allowed(output) < len(output):
            raise GrammarRefused("the tokens do not fit")
        state.output += output
        return state

    @property
    def is_complete(self) -> bool:
        return len(self.output) == self.most

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        room = self.most - len(self.output)
        good = 0
        while good < min(room, len(token_ids)) and token_ids[good] % self.modulus == 0:
            good += 1
        return good

    def accept(self, token_id: int) -> None:
        assert self.num_allowed([token_id]) == 1
        self.output.append(token_id)

    def fill(self, drafts: Sequence[int]) -> None:
        assert self.num_allowed(drafts) == len(drafts), "drafts were not cut"
        assert self.end is not None
        allowed = sum(1 << token for token in range(VOCAB - 1) if token % self.modulus == 0)
        row = (allowed | sum(1 << token for token in self.end.token_ids)).to_bytes(VOCAB // 8 + 1, "little")
        self.rows = [row] * (len(drafts) + 1)

    def bits(self, num_drafts: int) -> bytes | None:
        if self.fails_after is not None and len(self.output) >= self.fails_after:
            raise GrammarFailed("it is spent")
        return self.rows[num_drafts]


class Backend:
    """Compiles "modulus most"; "bad" is refused, and `gate` holds everything up."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.compiled: list[str] = []
        self.is_busy = False
        self.fails_after: int | None = None
        self.cost_s: dict[str, float] = {}  # of masks
        self.num_bytes = 1000  # of each grammar

    def compile(self, grammar: Grammar) -> Rising:
        assert self.gate.wait(20)
        self.compiled.append(grammar.text)
        if self.is_busy:
            raise GrammarRefused("Later.", code="queue_full")
        if grammar.text == "bad":
            raise GrammarRefused("it is bad")
        if grammar.text == "broken":
            raise ValueError("a bug")
        modulus, most = map(int, grammar.text.split())
        rising = Rising(modulus, most)
        rising.fails_after = self.fails_after
        rising.cost_s = self.cost_s.get(grammar.text, 0.0)
        rising.num_bytes = self.num_bytes
        return rising


def with_grammar(request: GenerateRequest, text: str) -> GenerateRequest:
    return replace(request, grammar=Grammar(kind=GrammarKind.REGEX, text=text))


def engine_of(backend: Backend | None, **options: object) -> Engine:
    return make_engine(grammars=backend, eos=(EOS,), **options)[0]  # type: ignore[arg-type]


def settled(engine: Engine, transcript: Transcript | None = None, timeout_s: float = 20.0) -> Transcript:
    """As `run`, with time for the compile threads."""
    transcript = transcript or Transcript()
    deadline = time.monotonic() + timeout_s
    while engine.has_work():
        assert time.monotonic() < deadline
        chunks = engine.step()
        transcript.take(chunks)
        engine.check_integrity()
        if not chunks:
            time.sleep(0.001)
    return transcript
