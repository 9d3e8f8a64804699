"""What an answer must look like: `response_format` (OpenAI's) and `structured_outputs` (vLLM's).

Only the outer shape is checked here; the group that compiles the grammar says whether it is a good one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from router.api.errors import ApiError, invalid, quoted, short, unsupported
from workers.types import INVALID_GRAMMAR, MAX_GRAMMAR_BYTES, Grammar, GrammarKind

ANY_OBJECT = Grammar(kind=GrammarKind.JSON_SCHEMA, text='{"type":"object"}')
_MAX_NAME_CHARS = 64  # OpenAI's
_KINDS = ("json", "regex", "choice", "grammar", "json_object")
_SCHEMA_FIELDS = ("name", "description", "schema", "strict")


class AskedGrammar(NamedTuple):
    """A grammar and the field that asked for it."""

    grammar: Grammar
    param: str


def asked_grammar(
    response_format: Mapping[str, Any] | None, structured_outputs: Mapping[str, Any] | None
) -> AskedGrammar | None:
    """None: any text will do. Raises ApiError 400."""
    first = _of_format(response_format) if response_format is not None else None
    second = _of_outputs(structured_outputs) if structured_outputs is not None else None
    if first is not None and second is not None:
        raise invalid(
            "response_format and structured_outputs exclude each other.", param="structured_outputs"
        )
    return first or second


def _of_format(value: Mapping[str, Any]) -> AskedGrammar | None:
    kind = value.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise invalid(
            f"response_format.type must be text, json_object or json_schema, got {short(kind)}.",
            param="response_format.type",
        )
    known = ("type", "json_schema") if kind == "json_schema" else ("type",)
    _check_known(value, known, "response_format")
    if kind == "text":
        return None
    if kind == "json_object":
        return AskedGrammar(ANY_OBJECT, "response_format")
    param = "response_format.json_schema"
    body = value.get("json_schema")
    if not isinstance(body, Mapping):
        raise _bad_schema(f"response_format of type json_schema needs json_schema, got {short(body)}.", param)
    _check_known(body, _SCHEMA_FIELDS, param)
    name, strict = body.get("name"), body.get("strict")
    if not (isinstance(name, str) and 1 <= len(name) <= _MAX_NAME_CHARS):
        raise invalid(
            f"{param}.name must have 1 to {_MAX_NAME_CHARS} characters, got {short(name)}.",
            param=f"{param}.name",
        )
    if not (strict is None or isinstance(strict, bool)):
        raise invalid(f"{param}.strict must be true or false, got {short(strict)}.", param=f"{param}.strict")
    return _schema(body.get("schema"), f"{param}.schema")


def _of_outputs(value: Mapping[str, Any]) -> AskedGrammar | None:
    param = "structured_outputs"
    given = {name: each for name, each in value.items() if each is not None}
    for name in given:
        if name not in _KINDS:
            raise unsupported(f"{param}.{name[:64]}")
    if given.get("json_object") is False:
        del given["json_object"]
    if len(given) != 1:
        raise invalid(f"{param} needs exactly one of {', '.join(_KINDS)}, got {len(given)}.", param=param)
    ((name, asked),) = given.items()
    param = f"{param}.{name}"
    if name == "json":
        return _schema(asked, param)
    if name == "json_object":
        if asked is not True:
            raise invalid(f"{param} must be true or false, got {short(asked)}.", param=param)
        return AskedGrammar(ANY_OBJECT, param)
    if name == "choice":
        if not (isinstance(asked, list) and asked and all(isinstance(each, str) and each for each in asked)):
            raise invalid(f"{param} must be a list of texts, none of them empty.", param=param)
        return _asked(GrammarKind.CHOICE, json.dumps(asked, ensure_ascii=False), param)
    if not isinstance(asked, str):
        raise invalid(f"{param} must be a string, got {short(asked)}.", param=param, code="invalid_type")
    return _asked(GrammarKind.REGEX if name == "regex" else GrammarKind.LARK, asked, param)


def _schema(schema: object, param: str) -> AskedGrammar:
    if isinstance(schema, str):  # vLLM takes a schema written as text too
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            raise _bad_schema(f"{param} is no JSON.", param) from None
    if not isinstance(schema, Mapping):
        raise _bad_schema(f"{param} must be a JSON schema, which is an object, got {short(schema)}.", param)
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (ValueError, RecursionError):
        raise _bad_schema(f"{param} cannot be written as JSON.", param) from None
    return _asked(GrammarKind.JSON_SCHEMA, text, param)


def _asked(kind: GrammarKind, text: str, param: str) -> AskedGrammar:
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise _bad_schema(f"{param} has half a character (a lone surrogate).", param) from None
    if not 1 <= size <= MAX_GRAMMAR_BYTES:
        raise _bad_schema(f"{param} has {size} bytes: it must have 1 to {MAX_GRAMMAR_BYTES}.", param)
    return AskedGrammar(Grammar(kind=kind, text=text), param)


def _check_known(value: Mapping[str, Any], known: tuple[str, ...], param: str) -> None:
    for name, given in value.items():
        if name not in known and given is not None:
            raise invalid(
                f"Unknown parameter: {quoted(f'{param}.{name}')}.", param=param, code="unknown_parameter"
            )


def _bad_schema(message: str, param: str) -> ApiError:
    return invalid(message, param=param, code=INVALID_GRAMMAR)
