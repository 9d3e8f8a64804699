"""Masks of grammars: those that fail, take too long, or cannot go on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest

from tests.unit.engine.rising import EOS, Backend, Rising, settled, with_grammar
from tests.unit.engine.toy import Transcript, make_engine, make_request, numbers
from workers.config import SpeculativeConfig
from workers.engine import masks
from workers.engine.grammars import AnswerEnd
from workers.engine.masks import GrammarCursor
from workers.engine.step import GrammarFailed
from workers.types import (
    FinishReason,
    Grammar,
)


class Panics(BaseException):
    """As those of extensions in Rust."""


@pytest.mark.parametrize("where", ["fill", "accept", "num_allowed"])
@pytest.mark.parametrize("error", [ValueError("a bug"), Panics("at line 1")])
def test_a_grammar_that_breaks_ends_its_own_request_only(error: BaseException, where: str) -> None:
    class Broken(Rising):
        def begin(self, end: AnswerEnd, output: Sequence[int]) -> Rising:
            return Broken(self.modulus, self.most, end)

        def num_allowed(self, token_ids: Sequence[int]) -> int:
            self.breaks("num_allowed", 2)
            return super().num_allowed(token_ids)

        def accept(self, token_id: int) -> None:
            self.output.append(token_id)
            self.breaks("accept", 2)

        def fill(self, drafts: Sequence[int]) -> None:
            self.breaks("fill", 2)
            super().fill(drafts)

        def breaks(self, place: str, num_output: int) -> None:
            if place == where and len(self.output) == num_output:
                raise error

    class BrokenBackend(Backend):
        def compile(self, grammar: Grammar) -> Rising:
            return Broken(2, 9) if grammar.text == "broken" else super().compile(grammar)

    guessing = SpeculativeConfig(method="lookahead", max_draft_tokens=2)
    engine, executor = make_engine(grammars=BrokenBackend(), eos=(EOS,), speculative=guessing)
    executor.spoil = lambda piece: _failure_of(piece.sample.allowed if piece.sample else None)
    for name, text in (("a", "2 6"), ("bad", "broken"), ("b", "3 6")):
        engine.add(with_grammar(make_request(name, numbers(20), 9), text))
    found = settled(engine)
    assert found.last["bad", 0].error == f"The grammar of this answer failed ({type(error).__name__})."
    assert len(found.tokens["bad", 0]) == 2
    assert found.reason("a") is found.reason("b") is FinishReason.STOP


def test_masks_that_take_too_long_end_those_that_wait_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the group, nor what has no grammar or has its mask already."""
    monkeypatch.setattr(masks, "_MASK_TIMEOUT_S", 0.1)
    is_slow, gate = threading.Event(), threading.Event()

    class Slow(Rising):
        def begin(self, end: AnswerEnd, output: Sequence[int]) -> Rising:
            return Slow(self.modulus, self.most, end)

        def fill(self, drafts: Sequence[int]) -> None:
            super().fill(drafts)
            assert not is_slow.is_set() or gate.wait(20)

    class SlowBackend(Backend):
        def compile(self, grammar: Grammar) -> Rising:
            return Slow(2, 900) if grammar.text == "slow" else super().compile(grammar)

    engine, executor = make_engine(grammars=SlowBackend(), eos=(EOS,))
    executor.spoil = lambda piece: _failure_of(piece.sample.allowed if piece.sample else None)
    found = Transcript()
    for name, text in (("a", "2 200"), ("slow", "slow"), ("b", "3 200")):  # masks are filled in this order
        engine.add(with_grammar(make_request(name, numbers(20), 300), text))
        while (name, 0) not in found.first:
            found.take(engine.step())
    engine.add(make_request("free", numbers(9, 1), 9))
    is_slow.set()
    while ("slow", 0) not in found.last:
        found.take(engine.step())
    gate.set()
    settled(engine, found)
    for name in ("slow", "b"):
        message = found.last[name, 0].error
        assert message is not None and message.endswith("take too long to compute. Try again later.")
    assert (len(found.tokens["free", 0]), found.reason("a")) == (9, FinishReason.STOP)


def test_a_grammar_that_cannot_go_on_ends_its_request() -> None:
    """The others' tokens and its own computed blocks are sound."""
    backend = Backend()
    backend.fails_after = 3
    engine, executor = make_engine(grammars=backend, eos=(EOS,))
    executor.spoil = lambda piece: _failure_of(piece.sample.allowed if piece.sample else None)
    engine.add(with_grammar(make_request("a", numbers(20), 9), "2 9"))
    engine.add(make_request("free", numbers(9, 1), 9))
    found = settled(engine)
    assert len(found.tokens["a", 0]) == 3
    assert (found.last["a", 0].error_code, found.last["a", 0].error) == ("invalid_schema", "it is spent")
    assert len(found.tokens["free", 0]) == 9


def test_costly_masks_do_not_hold_up_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a step's masks have cost enough, the costly ones of others are given up. Cheap ones go first."""
    monkeypatch.setattr("workers.engine.masks._MAX_STEP_S", 0.0)
    backend = Backend()
    backend.cost_s = {"2 5": 0.3, "3 5": 0.001, "5 5": 0.2}
    engine, executor = make_engine(grammars=backend, eos=(EOS,))
    executor.spoil = lambda piece: _failure_of(piece.sample.allowed if piece.sample else None)
    for text in backend.cost_s:
        engine.add(with_grammar(make_request(text, numbers(20), 5), text))
    engine.add(make_request("free", numbers(9, 1), 5))
    found = settled(engine)
    assert {name: len(found.tokens[name, 0]) for name in ("2 5", "3 5", "5 5", "free")} == {
        "2 5": 0,
        "3 5": 5,
        "5 5": 0,
        "free": 5,
    }
    assert "so costly" in (found.last["2 5", 0].error or "")


def test_a_mask_that_is_given_up_for_others_is_no_fault_of_its_grammar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("workers.engine.masks._MAX_STEP_S", 0.0)
    costly = Rising(2, 9, AnswerEnd(token_ids=(EOS,), min_tokens=0))
    costly.cost_s = 0.3
    cursor, filling = GrammarCursor(costly), masks.Masks()
    filling.fill([(cursor, ())])
    with pytest.raises(GrammarFailed, match="so costly") as failed:
        cursor.bits(0)
    assert failed.value.code == "queue_full"
    filling.close()


def _failure_of(allowed: object) -> str | None:
    bits: Callable[[int], bytes] | None = getattr(allowed, "bits", None)
    try:
        if bits is not None:
            bits(0)
    except GrammarFailed as error:
        return str(error)
    return None
