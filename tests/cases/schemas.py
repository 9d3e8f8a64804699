"""JSON schemas of many kinds, from a seed. All have answers of bounded length."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]

_WORDS = ("alpha", "beta", "gamma", "delta", "öl", 'quo"te', "back\\slash", "名")
_PATTERNS = ("^[a-z]{2,5}$", "^[A-Z][a-z]{1,4}$", "^\\d{2}-\\d{2}$", "^(red|green|blue)$", "^x[0-9a-f]{4}y$")
_FORMATS = ("date", "time", "uuid", "ipv4")


def random_schemas(count: int, seed: int) -> list[Schema]:
    """So many, each an object at its top."""
    draw = random.Random(seed)
    return [_rooted(draw) for _ in range(count)]


def _rooted(draw: random.Random) -> Schema:
    schema = _object(draw, depth=3)
    if draw.random() < 0.3:  # the same part in several places
        schema["$defs"] = {"part": _schema(draw, depth=1), "leaf": {"enum": [1, "one", None, True]}}
        schema["properties"]["shared"] = {"$ref": "#/$defs/part"}
        schema["properties"]["list"] = {"type": "array", "items": {"$ref": "#/$defs/leaf"}, "maxItems": 3}
        schema["required"] = [*schema["required"], "shared", "list"]
    return schema


def _schema(draw: random.Random, depth: int) -> Schema:
    makers = [_string, _integer, _number, _enum, _constant]
    if depth:
        makers += [_object, _array, _any_of, _tuple]
    return draw.choice(makers)(draw, depth - 1)


def _object(draw: random.Random, depth: int) -> Schema:
    names = draw.sample(_WORDS, draw.randint(1, 4))
    required = draw.sample(names, draw.randint(1, len(names)))
    return {
        "type": "object",
        "properties": {name: _schema(draw, depth) for name in names},
        "required": required,
        "additionalProperties": False,
    }


def _array(draw: random.Random, depth: int) -> Schema:
    least = draw.randint(0, 2)
    return {
        "type": "array",
        "items": _schema(draw, depth),
        "minItems": least,
        "maxItems": least + draw.randint(0, 2),
    }


def _tuple(draw: random.Random, depth: int) -> Schema:
    parts = [_schema(draw, depth) for _ in range(draw.randint(1, 3))]
    return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}


def _any_of(draw: random.Random, depth: int) -> Schema:
    return {"anyOf": [_schema(draw, depth) for _ in range(draw.randint(2, 3))]}


def _string(draw: random.Random, _depth: int) -> Schema:
    kind = draw.randrange(3)
    if kind == 0:
        return {"type": "string", "pattern": draw.choice(_PATTERNS)}
    if kind == 1:
        return {"type": "string", "format": draw.choice(_FORMATS)}
    least = draw.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + draw.randint(0, 6)}


def _integer(draw: random.Random, _depth: int) -> Schema:
    low = draw.randint(-1000, 1000)
    schema: Schema = {"type": "integer", "minimum": low, "maximum": low + draw.randint(0, 5000)}
    if draw.random() < 0.3:
        schema = {"type": "integer", "minimum": 0, "maximum": 1000, "multipleOf": draw.choice((2, 5, 10))}
    return schema


def _number(draw: random.Random, _depth: int) -> Schema:
    low = draw.randint(-100, 100)
    return {"type": "number", "exclusiveMinimum": low, "maximum": low + draw.randint(1, 50)}


def _enum(draw: random.Random, _depth: int) -> Schema:
    values: list[Any] = [*draw.sample(_WORDS, 2), draw.randint(-5, 5), None, draw.random() < 0.5]
    return {"enum": draw.sample(values, draw.randint(1, len(values)))}


def _constant(draw: random.Random, _depth: int) -> Schema:
    return {"const": draw.choice((*_WORDS, 7, False, None))}
