"""Schemas whose answers llguidance would not keep to are refused, and all that it keeps are not."""

from __future__ import annotations

import json
import random
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from tests.models.toy_tokenizers import byte_tokenizer
from workers.engine.grammars import GrammarRefused
from workers.structured.source import source_of
from workers.structured.vocabulary import read_vocabulary
from workers.types import Grammar, GrammarKind

INT64 = 1 << 63
EXACT = 1 << 53


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> LLTokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer().save_pretrained(folder)
    return read_vocabulary(folder, 259)


def source(schema: dict[str, Any]) -> str:
    return source_of(Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(schema)))


def accepts(vocabulary: LLTokenizer, schema: dict[str, Any], answer: str) -> bool:
    matcher = LLMatcher(vocabulary, source(schema), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = byte_tokenizer().encode(answer, add_special_tokens=False)
    return matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    "schema",
    [
        {"prefixItems": [{"type": "string"}], "additionalItems": False},
        {"prefixItems": [{"type": "string"}], "additionalItems": None},
        {"prefixItems": [{"type": "string"}], "items": [{"type": "integer"}]},
        {"properties": {"a": {"anyOf": [{"prefixItems": [], "additionalItems": {}}]}}},
        {"$defs": {"const": {"prefixItems": [], "additionalItems": {}}}},
    ],
)
def test_a_prefix_that_would_not_be_looked_at(schema: dict[str, Any]) -> None:
    with pytest.raises(GrammarRefused, match="prefixItems goes with neither"):
        source(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"const": EXACT + 1},
        {"enum": ["a", {"b": [INT64]}]},
        {"const": -INT64},
        {"enum": [10**400]},
        {"const": 123456789.12345679},
        {"type": "number", "minimum": 123456789.12345679},
        {"type": "integer", "minimum": EXACT + 1},
        {"type": "integer", "minimum": INT64, "maximum": INT64 + 5},
        {"type": "integer", "minimum": 1e20, "maximum": 1e21},
        {"type": "integer", "maximum": -1e20},
        {"type": "integer", "exclusiveMinimum": EXACT, "exclusiveMaximum": EXACT + 2},
        {"type": "integer", "exclusiveMaximum": 1e17},
        {"type": ["number", "null"], "maximum": INT64 - 1},
        {"items": {"properties": {"minimum": {"maximum": -EXACT - 1}}}},
    ],
)
def test_numbers_that_would_be_others(schema: dict[str, Any]) -> None:
    with pytest.raises(GrammarRefused, match="has more digits than answers can be held to"):
        source(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"properties": {"a": {"$ref": "#/properties/a"}}},
        {"$defs": {"a": {"$ref": "#/$defs/b%7E1~0"}, "b/~": {"$ref": "#/$defs/a", "type": "string"}}},
        {"anyOf": [{"$ref": "#/anyOf/1"}, {"$ref": "#/anyOf/0"}]},
    ],
)
def test_references_that_lead_to_themselves(schema: dict[str, Any]) -> None:
    with pytest.raises(GrammarRefused, match="leads back to itself"):
        source(schema)


def test_many_references_are_followed_once() -> None:
    rules = {f"r{i}": {"$ref": f"#/$defs/r{i + 1}"} for i in range(20_000)}
    began_at = time.monotonic()
    source({"$defs": rules | {"r20000": {"type": "integer"}}, "$ref": "#/$defs/r0"})
    assert time.monotonic() - began_at < 10.0


@pytest.mark.parametrize(
    ("schema", "answer", "wrong"),
    [
        (
            {"properties": {"a": {"$ref": "#"}, "b": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"const": 1}}},
            '{"a":{"b":1}}',
            '{"a":{"b":2}}',
        ),
        ({"const": EXACT}, str(EXACT), str(EXACT + 1)),
        ({"const": 10**18}, str(10**18), str(10**18 + 1)),
        ({"enum": [-0.5, 3.141592653589793, True]}, "3.141592653589793", "3.14159265358979"),
        ({"type": "integer", "minimum": 0, "maximum": INT64 - 1}, str(INT64 - 1), str(INT64)),
        ({"type": "integer", "minimum": 1, "maximum": 2 * INT64 - 1}, "7", "0"),
        ({"type": "integer", "exclusiveMaximum": EXACT - 1}, str(EXACT - 2), str(EXACT - 1)),
        ({"type": "number", "minimum": 1e20, "maximum": 1e20}, "1" + "0" * 20, "1"),
        ({"type": "array", "prefixItems": [{"const": 1}], "items": False}, "[1]", "[2]"),
        ({"type": "array", "items": [{"const": 1}], "additionalItems": False}, "[1]", "[1,1]"),
        (
            {
                "type": "object",
                "properties": {"prefixItems": {"const": 1}, "additionalItems": {"default": EXACT + 1}},
                "required": ["prefixItems"],
            },
            '{"prefixItems":1}',
            '{"prefixItems":2}',
        ),
    ],
)
def test_what_is_kept(vocabulary: LLTokenizer, schema: dict[str, Any], answer: str, wrong: str) -> None:
    assert accepts(vocabulary, schema, answer) and not accepts(vocabulary, schema, wrong)


def test_a_constant_that_is_taken_is_written_as_it_is(vocabulary: LLTokenizer) -> None:
    draw, num_taken = random.Random(1), 0
    for _ in range(300):
        value = draw.choice([draw.random(), round(draw.uniform(-1e6, 1e6), 3), draw.randrange(1 << 55)])
        try:
            source({"const": value})
        except GrammarRefused:
            continue
        num_taken += 1
        assert accepts(vocabulary, {"const": value}, f"{Decimal(repr(value)):f}")
    assert num_taken > 200
