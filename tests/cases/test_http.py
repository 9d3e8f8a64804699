"""Bodies that parse but should not pass, browsers and keys, over a real engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cases.conftest import Tiny
from tests.cases.serving import CHAT, COMPLETIONS, Serving, serving
from tests.unit.router.client import call, error_of

HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
ALIVE = {"prompt": "ping", "max_tokens": 4, "temperature": 0}

HOSTILE = [
    b'{"prompt": "\\ud83d", "max_tokens": 1',
    b'{"messages": [{"role": "user", "content": "\\ud83d"}], "max_tokens": 1',
    b'{"prompt": "a", "stop": "\\ud83d"',
    b'{"prompt": "a", "user": "\\ud83d"',
    *(
        b'{"prompt": "a", "temperature": ' + value
        for value in (b"NaN", b"Infinity", b"-Infinity", b'"NaN"', b"1e999")
    ),
    *(b'{"prompt": "a", "seed": ' + value for value in (b"18446744073709551616", b"-9223372036854775809")),
    *(
        b'{"prompt": "a", "max_tokens": ' + value
        for value in (b"1e30", b"10000000000000000000000", b"2.5", b"-3")
    ),
    b'{"prompt": "a", "n": 1000000000',
    b'{"prompt": "a", "logit_bias": {"5": NaN}',
    b'{"prompt": "\xff\xfe"',
    b'{"prompt": "' + b"x" * 30_000_000 + b'"',
    b'{"prompt": ' + b"[" * 5000 + b"]" * 5000,
    b'{"prompt": "a", "max_tokens": 1, "max_tokens": 2',
]


@pytest.mark.parametrize("raw", HOSTILE, ids=[str(raw[:48]) for raw in HOSTILE])
@pytest.mark.parametrize("stream", [b"}", b', "stream": true}'])
def test_hostile_bodies(tiny_server: Serving, raw: bytes, stream: bytes) -> None:
    alive = tiny_server.ids(ALIVE)
    path = CHAT if b"messages" in raw else COMPLETIONS
    response = call(tiny_server.stack.app, path, raw=raw + stream)
    assert response.status_code == (413 if len(raw) > 4 << 20 else 400)
    error_of(response)
    assert tiny_server.ids(ALIVE) == alive


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_nulls_change_nothing(tiny_server: Serving, path: str) -> None:
    start: dict[str, Any] = {"messages": HI} if path == CHAT else {"prompt": "hi"}
    app = tiny_server.stack.app
    schema = app.openapi()["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    nulls = {name: None for name in schema["properties"] if name not in start}
    body = {**nulls, **start, "max_tokens": 8, "seed": 5}
    assert (
        tiny_server.both(path, body).text
        == tiny_server.both(path, {**start, "max_tokens": 8, "seed": 5}).text
    )


def test_browsers_and_keys(tiny: Tiny, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("K\n")
    keys.chmod(0o600)
    origin = {"origin": "https://app.example"}
    with serving(tiny.folder, api_keys_file=str(keys), cors_origins=("https://app.example",)) as running:
        app = running.stack.app
        asks = {
            **origin,
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type",
        }
        preflight = call(app, CHAT, method="OPTIONS", headers=asks)
        assert preflight.status_code == 204
        assert preflight.headers["access-control-allow-origin"] == "https://app.example"
        assert preflight.headers["access-control-allow-headers"] == "authorization,content-type"
        for bad in (None, b"Bearer wrong", b"Basic K", b"Bearer \xffK", b"Bearer Kx"):
            response = call(app, "/v1/models", headers={} if bad is None else {"authorization": bad})
            assert (response.status_code, error_of(response)["type"]) == (401, "authentication_error")
        for good in ("bearer K", "BEARER  K", "Bearer K"):
            assert call(app, "/v1/models", headers={"authorization": good}).status_code == 200
        refused = call(app, CHAT, {"messages": HI}, headers=origin)
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://app.example"
        assert call(app, "/health").status_code == 200

        key = {"authorization": "Bearer K"}
        answers = {
            "unknown model": (call(app, CHAT, {"model": "nope", "messages": HI}, headers=key), 404),
            "no model": (call(app, CHAT, {"messages": HI, "max_tokens": 2}, headers=key), 200),
            "messages object": (call(app, CHAT, {"messages": {}}, headers=key), 400),
            "broken": (call(app, CHAT, raw=b'{"messages": [', headers=key), 400),
            "content type": (call(app, CHAT, raw=b"{}", headers={**key, "content-type": "text/plain"}), 415),
            "method": (call(app, CHAT, headers=key), 405),
            "path": (call(app, "/v1/nope", headers=key), 404),
        }
        for name, (response, status) in answers.items():
            assert response.status_code == status, name
            if status != 200:
                error_of(response)
        assert error_of(answers["unknown model"][0])["code"] == "model_not_found"
