"""What becomes of the texts of grammars: each character stands for what the client meant."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest
from llguidance import LLMatcher, LLTokenizer

from tests.models.toy_tokenizers import byte_tokenizer
from workers.engine.grammars import GrammarRefused
from workers.structured.source import source_of
from workers.structured.vocabulary import read_vocabulary
from workers.types import Grammar, GrammarKind

REGEX, CHOICE = GrammarKind.REGEX, GrammarKind.CHOICE
CHARACTERS = [*map(chr, range(0x120)), "\u2028", "\ufeff", "\U0001f600"]


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> LLTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer().save_pretrained(folder)
    return read_vocabulary(folder, 259)


def accepts(vocabulary: LLTokenizer, kind: GrammarKind, text: str, answer: str) -> bool:
    matcher = LLMatcher(vocabulary, source_of(Grammar(kind=kind, text=text)), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = byte_tokenizer().encode(answer, add_special_tokens=False)
    return matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("kind", "text_of"),
    [(CHOICE, lambda character: json.dumps([character])), (REGEX, re.escape)],
    ids=["choice", "regex"],
)
def test_every_character_stands_for_itself(
    vocabulary: LLTokenizer, kind: GrammarKind, text_of: Callable[[str], str]
) -> None:
    wrong = [each for each in CHARACTERS if not accepts(vocabulary, kind, text_of(each), each)]
    assert wrong == []


def test_choices_may_be_thousands_and_one_the_begin_of_another(vocabulary: LLTokenizer) -> None:
    text = json.dumps(["c", *(f"c{number}" for number in range(5000))])
    assert all(accepts(vocabulary, CHOICE, text, answer) for answer in ("c", "c4", "c499", "c4999"))
    assert not any(accepts(vocabulary, CHOICE, text, answer) for answer in ("c5000", "d", "cc", "c04"))


@pytest.mark.parametrize(
    ("pattern", "answer"),
    [("a\nb", "a\nb"), ("a\\\nb", "a\nb"), ("a\\\\\nb", "a\\\nb"), ("a\\nb", "a\nb"), ("a\\\\nb", "a\\nb")],
)
def test_new_lines_escaped_and_not(vocabulary: LLTokenizer, pattern: str, answer: str) -> None:
    assert re.fullmatch(pattern, answer)
    assert accepts(vocabulary, REGEX, pattern, answer)


@pytest.mark.parametrize("pattern", ["\\", "a\\", "^a\\\\\\"])
def test_a_regular_expression_that_ends_within_an_escape_is_refused(pattern: str) -> None:
    with pytest.raises(GrammarRefused, match="ends within an escape"):
        source_of(Grammar(kind=REGEX, text=pattern))


def test_a_last_dollar_that_is_escaped_stays(vocabulary: LLTokenizer) -> None:
    assert accepts(vocabulary, REGEX, r"a\$", "a$")
    assert not accepts(vocabulary, REGEX, "a$", "a$")


@pytest.mark.parametrize(
    ("pattern", "answer", "is_right"),
    [
        (r"\d", "7", True),
        (r"\d", "\u0967", False),
        (r"[a\d]", "\u0967", False),
        (r"\D", "\u0967", True),
        (r"[^\d]", "\u0967", True),
        (r"[^\d]", "7", False),
        (r"\\d", "\\d", True),
        (r"\\d", "\\7", False),
    ],
)
def test_digits_are_0_to_9(vocabulary: LLTokenizer, pattern: str, answer: str, is_right: bool) -> None:
    assert accepts(vocabulary, REGEX, pattern, answer) is is_right


@pytest.mark.parametrize("pattern", ["(?x) a # one\n b", "a(?ix-s:b\nc)", "(?x)a\\\nb"])
def test_new_lines_that_say_nothing_are_refused(pattern: str) -> None:
    with pytest.raises(GrammarRefused, match="the flag x and new lines"):
        source_of(Grammar(kind=REGEX, text=pattern))


@pytest.mark.parametrize(("pattern", "answer"), [("(?x) a b", "ab"), ("\\(?x\n", "(x\n"), ("(?i)X\n", "x\n")])
def test_the_flag_x_alone_is_taken(vocabulary: LLTokenizer, pattern: str, answer: str) -> None:
    assert accepts(vocabulary, REGEX, pattern, answer)
