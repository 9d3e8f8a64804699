from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.api.errors import ApiError
from router.api.json_body import ClientDisconnected, parse_object, read_body


def parse(raw: bytes, *, max_depth: int = 64, max_keys: int = 1000) -> dict[str, Any]:
    return parse_object(raw, max_depth=max_depth, max_keys=max_keys)


def refused(raw: bytes, **limits: int) -> tuple[str, str]:
    with pytest.raises(ApiError) as caught:
        parse(raw, **limits)
    assert caught.value.status == 400
    return caught.value.code, caught.value.message


@pytest.mark.parametrize(
    ("raw", "offset"),
    [
        (b"", 0),
        (b"{", 1),
        (b'{"a": 1', 7),
        (b'{"a": 1}x', 8),
        (b"\xef\xbb\xbf{}", 0),  # a byte order mark
        (b'{"a": "\xff"}', 7),
        ('{"ü": }'.encode(), 7),  # the offset counts bytes, not characters
        (b'{"a": NaN}', 6),
        (b'{"a": Infinity}', 6),
        (b'{"a": -Infinity}', 6),
        (b'{"NaN": "NaN", "b": [NaN]}', 21),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', 23),
        (b'{"a": 1, "\\u0061": 2}', 9),
        (b'{"a": "\\ud83d"}', 7),
        (b'{"a": "\\udd99\\ud83e"}', 7),
        (b'{"\\ud83d": 1}', 2),
        (b'{"a": "\x01"}', 7),
        (b'{"a": 1, "n": ' + b"1" * 5000 + b"}", 14),
    ],
)
def test_refusals_name_the_byte(raw: bytes, offset: int) -> None:
    code, message = refused(raw)
    assert code == "invalid_json"
    assert f"at byte {offset}:" in message


def test_escapes_that_are_fine() -> None:
    assert parse(b'{"a": "\\ud83e\\udd99 \\\\ud83d"}') == {"a": "🦙 \\ud83d"}


@pytest.mark.parametrize(("raw", "kind"), [(b"[]", "an array"), (b"1", "a number"), (b"null", "null")])
def test_top_must_be_an_object(raw: bytes, kind: str) -> None:
    assert refused(raw) == ("invalid_type", f"The body must be a JSON object, got {kind}.")


def test_depth_and_keys() -> None:
    assert parse(b'{"a": ' + b"[" * 63 + b"]" * 63 + b"}")
    assert refused(b'{"a": ' + b"[" * 64 + b"]" * 64 + b"}")[0] == "json_too_deep"
    assert refused(b"[" * 5000 + b"]" * 5000)[0] == "json_too_deep"
    many = ",".join(f'"{i}": 0' for i in range(20))
    assert len(parse(f"{{{many}}}".encode(), max_keys=20)) == 20
    assert refused(f"{{{many}}}".encode(), max_keys=19)[0] == "json_too_large"
    # Elements of arrays count as keys do, except numbers: a prompt of token ids may be long.
    for element in ('""', "{}", "[]"):
        assert parse(f'{{"a": [{",".join([element] * 80)}], "b": {"[" * 9}{"]" * 9}}}'.encode(), max_keys=90)
        assert refused(f'{{"a": [{",".join(["[]"] * 80)},{element}]}}'.encode(), max_keys=81) == (
            "json_too_large",
            f"JSON with more than 81 keys and array elements (at byte {7 + 80 * 3}).",
        )
    assert parse(f'{{"a": [{",".join(["[1,2]"] * 80)}, {",".join(["1"] * 500)}]}}'.encode(), max_keys=81)


def test_hostile_bodies_take_little_time() -> None:
    began_at = time.monotonic()
    for raw in (
        b'{"a": "' + b'\\"' * 1_000_000,
        b'{"a": ' + b'"' * 1_000_000,
        b"[" * 2_000_000,
        b'{"a": "' + b"[" * 2_000_000 + b'"}',
        b"{" + b'"k":0,' * 300_000 + b'"k":0}',
        b'{"a": [' + b"[]," * 1_000_000 + b"[]]}",
        b'{"a": [' + b"{}," * 1_000_000 + b"{}]}",
        b'{"a": [' + b"[]," * 100 + b'"",' * 1_000_000 + b'""]}',
    ):
        try:
            parse(raw)
        except ApiError as error:
            assert error.status == 400
    assert time.monotonic() - began_at < 3.0


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.text(), st.text(), max_size=5), st.booleans())
def test_agrees_with_json(value: dict[str, str], ensure_ascii: bool) -> None:
    assert parse(json.dumps(value, ensure_ascii=ensure_ascii).encode("utf-8")) == value


HEADERS = {"content-type": "application/json"}


def read(messages: list[dict[str, Any]], headers: dict[str, str] = HEADERS, timeout_s: float = 5.0) -> bytes:
    async def receive() -> dict[str, Any]:
        if not messages:
            await asyncio.sleep(60)
        return messages.pop(0)

    return asyncio.run(read_body(receive, headers, max_bytes=10, timeout_s=timeout_s))


def part(body: bytes, more: bool) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


def test_reads_parts() -> None:
    assert read([part(b"12345", True), part(b"67890", False)]) == b"1234567890"


@pytest.mark.parametrize(
    ("headers", "messages", "status"),
    [
        ({**HEADERS, "content-length": "11"}, [], 413),
        ({**HEADERS, "content-length": "9" * 500}, [], 413),
        (HEADERS, [part(b"123456", True), part(b"78901", True)], 413),
        (HEADERS, [part(b"123456", True)], 408),
        ({}, [], 415),
        ({"content-type": "text/plain"}, [], 415),
        ({"content-type": "application/json; charset=latin-1"}, [], 415),
        ({**HEADERS, "content-encoding": "gzip"}, [], 415),
    ],
)
def test_refuses_bodies(headers: dict[str, str], messages: list[dict[str, Any]], status: int) -> None:
    with pytest.raises(ApiError) as caught:
        read(messages, headers, timeout_s=0.05)
    assert caught.value.status == status


def test_charset_utf8_is_fine() -> None:
    assert read([part(b"{}", False)], {"content-type": "Application/JSON; charset=UTF-8"}) == b"{}"


def test_client_leaves_while_sending() -> None:
    with pytest.raises(ClientDisconnected):
        read([part(b"1", True), {"type": "http.disconnect"}])
