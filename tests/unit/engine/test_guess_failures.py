"""Guessing that fails costs guesses and nothing else."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import pytest

from tests.unit.engine.toy import make_engine, make_request, numbers, reference, run
from tests.unit.engine.toy_model import ToyDraft, ToyHeads
from workers.config import SpeculativeConfig
from workers.decoding.drafter import DRAFT_MODEL, MEDUSA
from workers.decoding.prompt_lookup import PromptLookup
from workers.engine import text_guesses
from workers.engine.model_guesses import ModelGuesses
from workers.engine.proposals import DraftTask, HeadTask, Proposals
from workers.engine.step import GroupFailed

REQUEST = make_request("a", numbers(9), 60, top_k=2)


def config(method: str) -> SpeculativeConfig:
    return SpeculativeConfig(method=method, max_draft_tokens=4)


class Faults:
    """Raises in every call, or in the first few."""

    def __init__(self, most: int = 1_000_000) -> None:
        self.most = most
        self.num_calls = 0

    def maybe(self) -> None:
        self.num_calls += 1
        if self.num_calls <= self.most:
            raise RuntimeError("no memory")


def break_lookup(monkeypatch: pytest.MonkeyPatch, call: Callable[[], None]) -> None:
    class Broken(PromptLookup):
        def propose(self, max_tokens: int) -> tuple[int, ...]:
            call()
            return super().propose(max_tokens)

    monkeypatch.setattr(text_guesses, "drafter_of", lambda method: Broken())


def break_draft(monkeypatch: pytest.MonkeyPatch, call: Callable[[], None]) -> None:
    propose = ToyDraft.propose

    def broken(draft: ToyDraft, tasks: Sequence[DraftTask]) -> Proposals:
        call()
        return propose(draft, tasks)

    monkeypatch.setattr(ToyDraft, "propose", broken)


def break_heads(monkeypatch: pytest.MonkeyPatch, call: Callable[[], None]) -> None:
    propose = ToyHeads.propose

    def broken(heads: ToyHeads, step_number: int, tasks: Sequence[HeadTask]) -> Proposals:
        call()
        return propose(heads, step_number, tasks)

    monkeypatch.setattr(ToyHeads, "propose", broken)


Break = Callable[[pytest.MonkeyPatch, Callable[[], None]], None]
WAYS: dict[str, Break] = {"prompt_lookup": break_lookup, DRAFT_MODEL: break_draft, MEDUSA: break_heads}


@pytest.mark.parametrize("method", WAYS)
def test_what_always_raises_is_asked_three_times(
    method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    faults = Faults()
    WAYS[method](monkeypatch, faults.maybe)
    engine, _ = make_engine(block_size=2, speculative=config(method))
    engine.add(REQUEST)
    with caplog.at_level(logging.ERROR):
        transcript = run(engine)  # asserts that no block stays behind
    assert transcript.tokens["a", 0] == reference(REQUEST)
    stats = engine.stats()
    assert (faults.num_calls, stats.guess_failures_total, stats.guesses_off) == (3, 3, 1)
    assert stats.drafted_tokens_total == 0
    assert [record.message for record in caplog.records] == [
        "guessing fails: this step goes without",
        "nothing is guessed any more until this group is started anew: 3 failures in a row, the last one "
        "RuntimeError('no memory')",
    ]


@pytest.mark.parametrize("name", ["limits", "unread"])
def test_what_cannot_say_what_there_is_to_guess_is_not_asked_to_guess(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    faults = Faults()
    monkeypatch.setattr(ModelGuesses, name, lambda *_: faults.maybe())
    engine, executor = make_engine(speculative=config(DRAFT_MODEL))
    engine.add(REQUEST)
    with caplog.at_level(logging.ERROR):
        assert run(engine).tokens["a", 0] == reference(REQUEST)
    stats = engine.stats()
    assert (faults.num_calls, stats.guess_failures_total, stats.guesses_off) == (3, 3, 1)
    assert not any(piece.num_drafts for plan in executor.plans for piece in plan.slices)
    assert len(caplog.records) == 2


@pytest.mark.parametrize("method", WAYS)
def test_what_raises_now_and_then_goes_on(
    method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    faults = Faults(2)
    WAYS[method](monkeypatch, faults.maybe)
    engine, _ = make_engine(block_size=2, speculative=config(method))
    engine.add(REQUEST)
    with caplog.at_level(logging.ERROR):
        assert run(engine).tokens["a", 0] == reference(REQUEST)
    stats = engine.stats()
    assert (stats.guess_failures_total, stats.guesses_off) == (2, 0)
    assert stats.accepted_tokens_total > 0
    assert [record.message for record in caplog.records] == ["guessing fails: this step goes without"]


@pytest.mark.parametrize("method", WAYS)
def test_a_broken_rank_ends_the_group(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise GroupFailed("rank 0 is gone")

    WAYS[method](monkeypatch, fail)
    engine, _ = make_engine(speculative=config(method))
    engine.add(REQUEST)
    with pytest.raises(GroupFailed, match="rank 0 is gone"):
        run(engine)


@pytest.mark.parametrize("kind", [ToyDraft, ToyHeads])
@pytest.mark.parametrize("num_broken", [2, 3])
def test_values_that_are_not_finite_end_guessing_when_they_come_three_times_in_a_row(
    kind: type[ToyDraft | ToyHeads],
    num_broken: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """From the third look on; what was guessed before the value came up is checked all the same."""
    propose, calls = kind.propose, [0]

    def spoiled(*told: object) -> Proposals:
        calls[0] += 1
        return propose(*told)._replace(is_broken=2 < calls[0] <= 2 + num_broken)  # type: ignore[arg-type]

    monkeypatch.setattr(kind, "propose", spoiled)
    engine, executor = make_engine(speculative=config(DRAFT_MODEL if kind is ToyDraft else MEDUSA))
    engine.add(REQUEST)
    with caplog.at_level(logging.ERROR):
        assert run(engine).tokens["a", 0] == reference(REQUEST)
    stats = engine.stats()
    assert (stats.guess_failures_total, stats.guesses_off) == (num_broken, int(num_broken == 3))
    assert (calls[0] == 5) is (num_broken == 3)
    assert sum(any(piece.num_drafts for piece in plan.slices) for plan in executor.plans) >= 5
    assert [record.message for record in caplog.records] == [
        "what guesses has computed values that are not finite numbers",
        "nothing is guessed any more until this group is started anew: 3 failures in a row, the last one "
        "values that are not finite numbers",
    ][: num_broken - 1]
