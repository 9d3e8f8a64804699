"""What llguidance takes in a JSON schema and does not keep to: answers would be others than it says."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any, TypeGuard
from urllib.parse import unquote

from workers.engine.grammars import GrammarRefused

_MAPS = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
_VALUES = frozenset(("const", "enum", "default", "examples"))  # no schemas in there
_LOWEST, _HIGHEST = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_EXACT = 1 << 53  # up to here a double is every whole number
_INT64 = 1 << 63
_MAX_SHOWN = 40  # characters, in messages


def check_schema(schema: Mapping[str, Any]) -> None:
    """Raises GrammarRefused."""
    parts: list[Any] = [schema]
    ending: set[str] = set()  # references that lead to something
    while parts:
        part = parts.pop()
        if isinstance(part, list):
            parts += part
        if not isinstance(part, dict):
            continue
        _check_items(part)
        _check_bounds(part)
        _check_reference(schema, part, ending)
        for value in _numbers([part.get("const"), part.get("enum")]):
            if not _is_kept(value):
                raise _inexact(value)
        for key, value in part.items():
            if key in _MAPS and isinstance(value, dict):
                parts += value.values()
            elif key not in _VALUES:
                parts.append(value)


def _check_items(part: Mapping[str, Any]) -> None:
    """A list of `items`, and `additionalItems`, are of drafts that have no `prefixItems`: it is not looked
    at."""
    if "prefixItems" in part and ("additionalItems" in part or isinstance(part.get("items"), list)):
        raise GrammarRefused(
            "prefixItems goes with neither additionalItems nor a list of items: what comes after the prefix "
            "is said by items, which is a schema or false"
        )


def _check_bounds(part: Mapping[str, Any]) -> None:
    """Bounds become doubles, and those of integers 64 bits then, the nearest they have."""
    kind = part.get("type")
    kinds = kind if isinstance(kind, list) else [kind]
    is_whole = "integer" in kinds and "number" not in kinds
    for name in (*_LOWEST, *_HIGHEST):
        bound = part.get(name)
        if not _is_number(bound):
            continue
        if is_whole and name == "maximum" and bound >= _INT64 - 1:
            continue  # no integer is that large
        is_outside = bound >= _INT64 if name in _LOWEST else bound <= -_INT64
        is_shifted = name.startswith("exclusive") and abs(bound) >= _EXACT  # to the next integer, as a double
        if not _is_kept(bound) or ("number" not in kinds and (is_outside or is_shifted)):
            raise _inexact(bound)


def _check_reference(schema: Mapping[str, Any], part: Any, ending: set[str]) -> None:
    """One that leads to itself is found by llguidance when an answer comes to it. Adds to `ending`."""
    chain: set[str] = set()
    while isinstance(part, dict) and isinstance(name := part.get("$ref"), str) and name not in ending:
        if name in chain:
            raise GrammarRefused(f"$ref {name[:_MAX_SHOWN]} leads back to itself, so nothing can be there")
        chain.add(name)
        part = _referred(schema, name)
    ending |= chain


def _referred(schema: Mapping[str, Any], reference: str) -> Any:
    """What is at a JSON pointer (RFC 6901) in a fragment; None: nothing, or not in this schema."""
    pointer = reference.removeprefix("#")
    if pointer == reference or (pointer and not pointer.startswith("/")):
        return None
    part: Any = schema
    for name in unquote(pointer).split("/")[1:]:
        key = name.replace("~1", "/").replace("~0", "~")
        if isinstance(part, dict):
            part = part.get(key)
        elif isinstance(part, list) and key.isdecimal() and len(key) < 6 and int(key) < len(part):
            part = part[int(key)]
        else:
            return None
    return part


def _numbers(value: Any) -> Iterator[int | float]:
    """Those in a JSON value."""
    parts = [value]
    while parts:
        part = parts.pop()
        if isinstance(part, list):
            parts += part
        elif isinstance(part, dict):
            parts += part.values()
        elif _is_number(part):
            yield part


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_kept(value: int | float) -> bool:
    """Whether the number is the same once it has been read as a double and written."""
    if isinstance(value, int):  # written whole, or with the digits that tell a double from others, then zeros
        return abs(value) < 2 * _INT64 and value == float(value) == int(Decimal(repr(float(value))))
    if not math.isfinite(value):
        return False
    # Its digits are read as one double and that is multiplied by a power of ten, so it is rounded twice.
    _, digits, exponent = Decimal(repr(value)).as_tuple()
    whole, power = float("".join(map(str, digits))), float(f"1e{abs(int(exponent))}")
    return (whole * power if int(exponent) > 0 else whole / power) == abs(value)


def _inexact(value: int | float) -> GrammarRefused:
    return GrammarRefused(
        f"the number {str(value)[:_MAX_SHOWN]} has more digits than answers can be held to: 15 are always "
        "kept, of integers those up to 2^53. Make strings of longer identifiers"
    )
