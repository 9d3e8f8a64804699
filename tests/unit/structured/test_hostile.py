"""Grammars that would take for ever to compile, or all memory."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.models.toy_tokenizers import byte_tokenizer
from workers.engine.grammars import GrammarRefused
from workers.structured.backend import LlguidanceBackend
from workers.structured.source import source_of
from workers.structured.trial import Trials
from workers.types import Grammar, GrammarKind


def all_of(num_patterns: int) -> Grammar:
    """An intersection, whose cost rises tenfold with two more patterns."""
    patterns = [{"type": "string", "pattern": f".*{chr(97 + i)}.{{{i}}}.*"} for i in range(num_patterns)]
    return Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps({"allOf": patterns}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("other_limit", "value", "words"),
    [("_MAX_MEMORY_BYTES", 4 << 30, "more than 2 s"), ("_MAX_CPU_S", 60, "more than 512 MB")],
)
def test_one_that_never_ends_is_refused_and_the_next_is_compiled(
    folder: Path, monkeypatch: pytest.MonkeyPatch, other_limit: str, value: int, words: str
) -> None:
    """Which limit it comes to first is up to the machine."""
    monkeypatch.setattr(f"workers.structured.trial.{other_limit}", value)
    backend = LlguidanceBackend(folder, 259)
    began_s, used_s = time.monotonic(), time.process_time()
    with pytest.raises(GrammarRefused, match=f"{words} to compile"):
        backend.compile(all_of(26))
    assert time.monotonic() - began_s < 25.0
    assert time.process_time() - used_s < 2.0  # no thread of this process goes on with it
    backend.compile(Grammar(kind=GrammarKind.REGEX, text="[ab]c?"))


@pytest.mark.parametrize(
    "grammar",
    [
        # A lexer with a state for every remainder.
        Grammar(
            kind=GrammarKind.JSON_SCHEMA,
            text=json.dumps(
                {"type": "integer", "allOf": [{"multipleOf": p} for p in (7, 11, 13, 17, 19, 23)]}
            ),
        ),
        Grammar(kind=GrammarKind.REGEX, text="a?" * 30_000),
        Grammar(kind=GrammarKind.REGEX, text="(.*)*" * 10_000),
    ],
    ids=["multiples", "options", "repetitions"],
)
def test_a_lexer_that_takes_for_ever_is_refused(folder: Path, grammar: Grammar) -> None:
    """That is made for a vocabulary, once the rules are known to be good."""
    backend = LlguidanceBackend(folder, 259)
    backend.warm()
    used_s = time.process_time()
    with pytest.raises(GrammarRefused, match="to compile: make it smaller"):
        backend.compile(grammar)
    assert time.process_time() - used_s < 2.0


def test_a_grammar_says_the_memory_that_it_takes(folder: Path) -> None:
    """Else a few dozen of them that are kept would take it all."""
    backend = LlguidanceBackend(folder, 259)
    multiples = {"type": "integer", "allOf": [{"multipleOf": factor} for factor in (7, 11, 13, 37)]}
    small = backend.compile(Grammar(kind=GrammarKind.REGEX, text="[ab]c?"))
    large = backend.compile(Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(multiples)))
    assert large.num_bytes > small.num_bytes + (8 << 20)
    again = backend.compile(Grammar(kind=GrammarKind.REGEX, text="[ab]c?"))
    assert again.num_bytes < small.num_bytes + (4 << 20)


@pytest.mark.parametrize("letter", ["a", "A"])
def test_rules_that_leave_no_stack_are_refused_long_before_a_thread_has_none(
    folder: Path, letter: str
) -> None:
    """Which would end the whole group."""
    trials = Trials(folder, 259, 20_000)

    def chain(length: int) -> str:
        rules = "".join(f"{letter}{i}: {letter}{i + 1}\n" for i in range(length))
        return f'%llguidance {{}}\nstart: {letter}0\n{rules}{letter}{length}: "x"\n'

    assert trials.verdict_on(chain(100)).problem == ""
    with pytest.raises(GrammarRefused, match="nested too deeply") as refused:
        trials.verdict_on(chain(2000))
    assert refused.value.code == "invalid_schema"


def test_a_process_that_has_ended_is_not_used_again(folder: Path) -> None:
    trials = Trials(folder, 259, 100)
    good = '%llguidance {}\nstart: "a"'
    assert trials.verdict_on(good).problem == ""
    (process,) = trials._idle
    assert trials.verdict_on("start: x").problem.startswith("at 1(8)")
    os.kill(process._process.pid, signal.SIGKILL)
    process._process.wait(10)
    assert trials.verdict_on(good).problem == ""  # and that grammar is not to blame for it
    assert trials._idle != [process]


def test_a_process_that_cannot_be_started_is_told_to_the_log(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("workers.structured.trial.sys.executable", "/nothing/there")
    trials = Trials(folder, 259, 100)
    trials.start()
    with pytest.raises(GrammarRefused):
        trials.verdict_on("start: x")
    assert caplog.text.count("no process could be started to compile") == 2
    assert caplog.text.count("/nothing/there") == 2


def test_a_machine_that_is_too_busy_is_no_fault_of_the_grammar(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = Trials(folder, 259, 100)
    trials.start()
    monkeypatch.setattr("workers.structured.trial._MAX_WAIT_S", 0.2)
    with pytest.raises(GrammarRefused, match="too busy") as refused:
        trials.verdict_on(source_of(all_of(26)))
    assert refused.value.code == "queue_full"
    monkeypatch.setattr("workers.structured.trial.sys.executable", "/nothing/there")
    with pytest.raises(GrammarRefused, match="No process could be started") as refused:
        trials.verdict_on("start: x")
    assert refused.value.code == "queue_full"
