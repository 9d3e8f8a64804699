"""Request bodies: read with limits, then parsed as strict JSON.

Strict means RFC 8259 and more: UTF-8, an object at the top, no NaN or Infinity, no key twice in one object,
no unpaired surrogate, bounded depth and number of parts (keys, and array elements other than numbers), since
parsing runs on the event loop. Every refusal carries the byte offset of its cause.

Covered elsewhere: types and ranges of the fields (`protocol`).
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, NoReturn

from router.api.errors import ApiError, invalid, quoted

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

# Every token that matters for structure. A string always matches to its end or to the end of the data, and
# the quantifiers are possessive, so the scan is linear on any input.
_TOKEN = re.compile(
    rb'"(?:[^"\\]++|\\.)*+(?P<closed>"\s*+(?P<colon>:)?+)?+|[{}\[\]]|-?Infinity|NaN',
    re.DOTALL,
)
# Escapes in order of preference: anything but \u, a proper pair of surrogates, a lone one (group 1).
_ESCAPE = re.compile(
    r"\\[^u]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})"
)


class ClientDisconnected(Exception):
    """The client closed the connection before the request was complete: nobody to answer."""


async def read_body(
    receive: Receive, headers: Mapping[str, str], *, max_bytes: int, timeout_s: float
) -> bytes:
    """The whole body. Raises ApiError 413 at the limit, 408 after `timeout_s`, 415 for what is not JSON."""
    _check_content(headers)
    too_large = ApiError(
        413,
        f"The body is larger than {max_bytes} bytes.",
        code="body_too_large",
        headers={"connection": "close"},
    )
    announced = headers.get("content-length", "")
    if announced.isascii() and announced.isdigit() and int(announced[:20]) > max_bytes:
        raise too_large
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnected
                part = message.get("body", b"")
                size += len(part)
                if size > max_bytes:
                    raise too_large
                parts.append(part)
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        raise ApiError(
            408,
            f"The body did not arrive within {timeout_s:g} s.",
            code="body_timeout",
            headers={"connection": "close"},
        ) from None


def _check_content(headers: Mapping[str, str]) -> None:
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise ApiError(
            415,
            f"Content-Encoding {quoted(encoding)} is not accepted; send the body uncompressed.",
            code="unsupported_content_encoding",
        )
    media, _, parameters = headers.get("content-type", "").partition(";")
    media = media.strip().lower()
    charset = re.search(r'charset\s*=\s*"?([\w-]+)', parameters.lower())
    if media != "application/json" or (charset and charset[1] not in ("utf-8", "utf8", "us-ascii")):
        found = quoted(headers.get("content-type", ""))
        raise ApiError(
            415,
            f"Content-Type must be application/json in UTF-8, got {found}.",
            code="unsupported_media_type",
        )


def parse_object(body: bytes, *, max_depth: int, max_keys: int) -> dict[str, Any]:
    """The JSON object in `body`. Raises ApiError 400 `invalid_json`, `json_too_deep` or `json_too_large`."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        _refuse("the body is not UTF-8", error.start)
    # Only a body with more brackets than the limit can be too deep: most skip the scan.
    if body.count(b"[") + body.count(b"{") > max_depth:
        _scan(body, max_depth, max_keys)
    num_keys = 0

    def build(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal num_keys
        num_keys += len(pairs)
        result = dict(pairs)
        if num_keys > max_keys or len(result) != len(pairs):
            raise _Suspicious
        return result

    try:
        value = json.loads(text, object_pairs_hook=build, parse_constant=_refuse_constant)
    except _Suspicious:
        _scan(body, max_depth, max_keys)
        _refuse("a key is there twice, or a number is NaN or infinite", 0)
    except json.JSONDecodeError as error:
        _refuse(f"{error.msg[:1].lower()}{error.msg[1:]}", len(text[: error.pos].encode("utf-8")))
    except ValueError:  # int() of thousands of digits
        _refuse("a number has too many digits", _offset_of_longest_number(body))
    if "\\u" in text:
        _check_surrogates(text)
    if not isinstance(value, dict):
        raise invalid(f"The body must be a JSON object, got {_kind(value)}.", code="invalid_type")
    return value


class _Suspicious(Exception):
    """Something is refused, and the scan will say where."""


def _refuse_constant(_: str) -> NoReturn:
    raise _Suspicious


def _refuse(what: str, offset: int) -> NoReturn:
    raise invalid(f"Invalid JSON at byte {offset}: {what}.", code="invalid_json")


def _scan(body: bytes, max_depth: int, max_keys: int) -> None:
    """Finds the first place that is too deep, a part too many, a key twice, or NaN or Infinity."""
    # One entry per open container: the keys of an object, None for an array.
    open_keys: list[set[str] | None] = []
    num_parts = 0
    for match in _TOKEN.finditer(body):
        token = match.group()
        first = token[:1]
        is_key = first == b'"' and match["colon"] is not None and bool(open_keys)
        is_element = first in b'"{[' and bool(open_keys) and open_keys[-1] is None
        if is_key or is_element:
            num_parts += 1
            if num_parts > max_keys:
                raise invalid(
                    f"JSON with more than {max_keys} keys and array elements (at byte {match.start()}).",
                    code="json_too_large",
                )
        if is_key:
            keys = open_keys[-1]
            key = _decode_key(body[match.start() : match.start("closed") + 1])
            if keys is None or key is None:
                continue  # not JSON here: the parser says what is wrong
            if key in keys:
                _refuse(f"the key {quoted(key)} is there twice", match.start())
            keys.add(key)
        elif first in (b"{", b"["):
            open_keys.append(set() if first == b"{" else None)
            if len(open_keys) > max_depth:
                raise invalid(
                    f"JSON nested deeper than {max_depth} (at byte {match.start()}).", code="json_too_deep"
                )
        elif first in (b"}", b"]"):
            if open_keys:
                open_keys.pop()
        elif first != b'"':
            _refuse(f"{token.decode('ascii')} is not a JSON number", match.start())


def _decode_key(literal: bytes) -> str | None:
    try:
        key = json.loads(literal)
    except ValueError:
        return None
    return key if isinstance(key, str) else None


def _check_surrogates(text: str) -> None:
    for match in _ESCAPE.finditer(text):
        if match[1] is not None:
            offset = len(text[: match.start()].encode("utf-8"))
            _refuse(f"{match[1]} is half of a surrogate pair and no character", offset)


def _offset_of_longest_number(body: bytes) -> int:
    longest = max(re.finditer(rb"\d+", body), key=lambda match: match.end() - match.start())
    return longest.start()


def _kind(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    return {str: "a string", int: "a number", float: "a number", list: "an array"}.get(
        type(value), "something else"
    )
