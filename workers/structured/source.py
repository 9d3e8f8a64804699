"""Grammars of requests in llguidance's own language, which is a dialect of Lark's.

Source: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

from __future__ import annotations

import json
import re
from typing import Any

from llguidance import regex_to_lark

from workers.engine.grammars import GrammarRefused
from workers.structured.schema import check_schema
from workers.types import Grammar, GrammarKind

# Forced text is not looked for: of a{1000000} it would be all of it, in one go, and nobody asks for it here.
_HEAD = '%llguidance {"no_forcing": true}\n'
# Between the parts of a JSON text: nothing, a space, or a new line with indentation. Any white space would
# let a model write nothing else for ever.
_JSON_OPTIONS = {"whitespace_pattern": "(\\n {0,32}| )", "lenient": False, "coerce_one_of": False}
_OPTIONS_KEY = "x-guidance"
_ESCAPES_AND_LINES = re.compile(r"\\?\n|\\.")
_VERBOSE = re.compile(r"\\.|(\(\?[a-zA-Z]*x)", re.DOTALL)


def source_of(grammar: Grammar) -> str:
    """What llguidance is to compile. Raises GrammarRefused for a text that is not what its kind says."""
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        return _HEAD + "start: %json " + _schema(grammar.text)
    if grammar.kind is GrammarKind.REGEX:
        return f"{_HEAD}start: /{_regex(grammar.text)}/"
    if grammar.kind is GrammarKind.CHOICE:
        # As one word, which may be any of thousands: as many rules would be more than the parser takes.
        return f"{_HEAD}start: TEXT\nTEXT: {_choice(grammar.text)}"
    if "%llguidance" in grammar.text:
        raise GrammarRefused("a grammar cannot have the directive %llguidance")
    return _HEAD + grammar.text


def _schema(text: str) -> str:
    schema = _parsed(text)
    if not isinstance(schema, dict):
        raise GrammarRefused("a JSON schema is an object")
    if _OPTIONS_KEY in schema:
        raise GrammarRefused(f"the key {_OPTIONS_KEY} is not supported")
    check_schema(schema)
    return json.dumps({**schema, _OPTIONS_KEY: _JSON_OPTIONS})


def _regex(text: str) -> str:
    if not text:
        raise GrammarRefused("the regular expression is empty")
    # The whole answer has to match: anchors at both ends say nothing more.
    text = text.removeprefix("^")
    if text.endswith("$") and (len(text) - len(text[:-1].rstrip("\\"))) % 2 == 1:
        text = text[:-1]
    if "\n" in text and any(found[1] for found in _VERBOSE.finditer(text)):
        raise GrammarRefused("the regular expression has the flag x and new lines, which say nothing then")
    # A new line may itself be escaped, as Python's `re.escape` has it.
    text = _ESCAPES_AND_LINES.sub(lambda found: found[0] if found[0][-1] != "\n" else "\\n", text)
    if (len(text) - len(text.rstrip("\\"))) % 2 == 1:
        raise GrammarRefused("the regular expression ends within an escape")
    return regex_to_lark(text, use_ascii="d")


def _choice(text: str) -> str:
    choices = _parsed(text)
    is_list = isinstance(choices, list) and all(isinstance(each, str) and each for each in choices)
    if not is_list or not choices:
        raise GrammarRefused("choices are a list of texts, none of them empty")
    return " | ".join(map(_quoted, dict.fromkeys(choices)))


def _quoted(text: str) -> str:
    """As JSON; there it may have a DEL as it is, and in llguidance's language not."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise GrammarRefused("it is nested too deeply") from None
    except ValueError as error:
        raise GrammarRefused(f"it is no JSON: {error}") from None
