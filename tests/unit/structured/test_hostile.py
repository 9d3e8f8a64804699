"""Grammars that would take for ever to compile, or all memory."""

from __future__ import annotations

import json
import time

import pytest

from tests.models.toy_tokenizers import byte_tokenizer
from workers.engine.grammars import GrammarRefused
from workers.structured.backend import LlguidanceBackend
from workers.structured.trial import Trials
from workers.types import Grammar, GrammarKind


def all_of(num_patterns: int) -> Grammar:
    """An intersection, whose cost rises tenfold with two more patterns."""
    patterns = [{"type": "string", "pattern": f".*{chr(97 + i)}.{{{i}}}.*"} for i in range(num_patterns)]
    return Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps({"allOf": patterns}))


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> LlguidanceBackend:
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer().save_pretrained(folder)
    return LlguidanceBackend(folder, 259)


def test_one_that_never_ends_is_refused_and_the_next_is_compiled(backend: LlguidanceBackend) -> None:
    began_s, used_s = time.monotonic(), time.process_time()
    with pytest.raises(GrammarRefused, match="more than 2 s to compile"):
        backend.compile(all_of(26))
    assert time.monotonic() - began_s < 25.0
    assert time.process_time() - used_s < 2.0  # no thread of this process goes on with it
    backend.compile(Grammar(kind=GrammarKind.REGEX, text="[ab]c?"))


def test_a_process_that_has_ended_is_not_used_again() -> None:
    trials = Trials(100)
    good = '%llguidance {}\nstart: "a"'
    assert trials.problem_with(good) == ""
    (process,) = trials._idle
    assert trials.problem_with("start: x").startswith("at 1(8)")
    process.end()
    with pytest.raises(ValueError, match="closed file"):
        trials.problem_with(good)
    assert trials.problem_with(good) == ""
