from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from router.api.auth import load_api_keys
from tests.unit.router.client import CHAT, COMPLETIONS, call, error_of
from tests.unit.router.fakes import Stack, stack

KEY = "sk-test"
GOOD = {"authorization": f"Bearer {KEY}"}
PATHS = [
    CHAT,
    COMPLETIONS,
    "/v1/models",
    "/metrics",
    "/admin/x",
    "/ready",
    "/version",
    "/openapi.json",
    "/nope",
    "/",
]


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Stack:
    """A router that asks for a key and may be called from one origin."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"# the team\n{KEY}\n\nother\n")
    keys.chmod(0o600)
    return stack(api_keys_file=str(keys), cors_origins=("https://app.example",))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "header",
    [
        None,
        b"Bearer wrong",
        b"Bearer",
        b"Bearer ",
        b"",
        f"Basic {KEY}".encode(),
        KEY.encode(),
        f"Bearer {KEY}x".encode(),
        f"Bearer x {KEY}".encode(),
        b"Bearer \xff" + KEY.encode(),
        "Bearer ключ".encode(),
    ],
)
def test_default_deny(locked: Stack, path: str, header: bytes | None) -> None:
    response = call(locked.app, path, headers={} if header is None else {"authorization": header})
    error = error_of(response)
    assert (response.status_code, error["type"], error["code"]) == (
        401,
        "authentication_error",
        "invalid_api_key",
    )
    assert error == error_of(call(locked.app, path))


@pytest.mark.parametrize(
    "header", [f"Bearer {KEY}", f"bearer {KEY}", f"BEARER  {KEY}", "Bearer other", f"Bearer {KEY} "]
)
def test_key_is_accepted(locked: Stack, header: str) -> None:
    assert call(locked.app, "/v1/models", headers={"authorization": header}).status_code == 200


def test_only_health_is_open(locked: Stack) -> None:
    assert call(locked.app, "/health").status_code == 200
    assert call(locked.app, "/health/").status_code == 401
    assert call(locked.app, "//health").status_code == 401


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", CHAT, 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("POST", CHAT + "/", 404, "not_found"),
        ("GET", "/v1/nope", 404, "not_found"),
        ("POST", "/v1/responses", 404, "not_found"),
        ("POST", "/v1/embeddings", 404, "not_found"),
        ("GET", "/docs", 404, "not_found"),
        ("GET", "/v1/models/nope", 404, "model_not_found"),
    ],
)
def test_unknown_routes(locked: Stack, method: str, path: str, status: int, code: str) -> None:
    response = call(locked.app, path, method=method, headers=GOOD)
    assert (response.status_code, error_of(response)["code"]) == (status, code)
    if status == 405:
        assert "allow" in response.headers


def test_preflight_needs_no_key(locked: Stack) -> None:
    asks = {
        "origin": "https://app.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    response = call(locked.app, CHAT, method="OPTIONS", headers=asks)
    assert response.status_code == 204
    assert response.headers["access-control-allow-origin"] == "https://app.example"
    assert response.headers["access-control-allow-headers"] == "authorization,content-type"
    assert "POST" in response.headers["access-control-allow-methods"]
    assert "access-control-allow-credentials" not in response.headers
    refused = call(locked.app, CHAT, {}, headers={"origin": "https://app.example"})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://app.example"


def test_other_origins_get_no_cors_header(locked: Stack) -> None:
    for app in (locked.app, stack().app):
        for method in ("OPTIONS", "GET"):
            response = call(app, "/health", method=method, headers={"origin": "https://evil.example"})
            assert not [name for name in response.headers if name.startswith("access-control")]
    anyone = call(stack(cors_origins=("*",)).app, "/health", headers={"origin": "https://evil.example"})
    assert anyone.headers["access-control-allow-origin"] == "*"
    assert "access-control-allow-credentials" not in anyone.headers


def test_head_is_get_without_the_body() -> None:
    router = stack()
    for path, status in (("/health", 200), ("/v1/models", 200), ("/none", 404), (CHAT, 405)):
        get, head = call(router.app, path, method="GET"), call(router.app, path, method="HEAD")
        assert (get.status_code, head.status_code, head.content) == (status, status, b"")
        assert head.headers["content-length"] == get.headers["content-length"]


def test_request_ids() -> None:
    app = stack().app
    first, second = call(app, "/health").headers["x-request-id"], call(app, "/health").headers["x-request-id"]
    assert first != second and len(first) == 32
    assert (
        call(app, "/health", headers={"x-request-id": "bench-1_a.b"}).headers["x-request-id"] == "bench-1_a.b"
    )
    for bad in ("x" * 65, "a b", "a\x1b[31m", "ü"):
        assert len(call(app, "/health", headers={"x-request-id": bad.encode()}).headers["x-request-id"]) == 32
    router = stack()
    body = call(router.app, COMPLETIONS, {"prompt": "a"}, headers={"x-request-id": "mine"}).json()
    assert "mine" not in body["id"]
    assert "mine" not in router.dispatcher.requests[0].request_id


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ([("x-long", "y" * 17_000)], 431, "headers_too_large"),
        ([("host", "a/?x")], 400, "invalid_header"),
        ([("host", "a b")], 400, "invalid_header"),
        ([("x-tandem-tenant", "other")], 400, "invalid_header"),
        ([("host", "a"), ("content-length", "0"), ("content-length", "0")], 400, "invalid_header"),
        ([("authorization", "Bearer a"), ("authorization", "Bearer b")], 400, "invalid_header"),
    ],
)
def test_bad_headers(headers: list[tuple[str, str]], status: int, code: str) -> None:
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "GET",
        "path": "/health",
        "raw_path": b"/health",
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in headers],
    }
    asyncio.run(stack().app(scope, receive, send))
    assert sent[0]["status"] == status
    assert code.encode() in sent[1]["body"]


@pytest.mark.parametrize("host", ["localhost", "a.b-c.example:8000", "127.0.0.1:80", "[::1]:8000"])
def test_good_hosts(host: str) -> None:
    assert call(stack().app, "/health", headers={"host": host}).status_code == 200


def test_websockets_are_closed() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    asyncio.run(stack().app({"type": "websocket", "path": "/", "headers": []}, receive, send))
    assert sent == [{"type": "websocket.close", "code": 1008}]
    sent.clear()
    scope = {
        "type": "websocket",
        "path": "/",
        "headers": [],
        "extensions": {"websocket.http.response": {}},
    }
    asyncio.run(stack().app(scope, receive, send))
    start, body = sent
    assert (start["type"], start["status"]) == ("websocket.http.response.start", 400)
    assert (b"content-type", b"application/json") in start["headers"]
    assert json.loads(body["body"])["error"]["code"] == "unsupported_upgrade"


def test_key_files(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("key")
    file.chmod(0o644)
    with pytest.raises(ValueError, match="chmod 600"):
        load_api_keys(str(file))
    file.chmod(0o600)
    assert load_api_keys(str(file)).required
    file.write_text("# nothing\n\n")
    with pytest.raises(ValueError, match="holds no key"):
        load_api_keys(str(file))
    file.write_text("two words\n")
    with pytest.raises(ValueError, match="keys:1:"):
        load_api_keys(str(file))
    assert not load_api_keys(None).required


def test_openapi_describes_the_bodies() -> None:
    document = call(stack().app, "/openapi.json").json()
    schema = document["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert schema["required"] == ["messages"]
    assert "$ref" not in str(schema)


def test_query_strings_change_nothing(locked: Stack) -> None:
    assert call(locked.app, "/health?x=/v1").status_code == 200
    assert call(locked.app, "/v1/models?/health").status_code == 401
