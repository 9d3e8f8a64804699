"""What clients see of the proxies in front of the router: error shape, request ids, time limits."""

from __future__ import annotations

import json
import re

import pytest

from tests.integration.local.raw import GET, ask, assert_refused
from tests.integration.serving import Serving

pytestmark = pytest.mark.integration

POST = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
BODY = b'{"prompt": "Tell a long story.", "max_tokens": 4000, "ignore_eos": true}'
WEBSOCKET = (
    b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
OWN_ID = "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"


@pytest.mark.parametrize(
    ("parts", "status", "code"),
    [
        ((b"GET / HTTP/1.1\r\nHost: a/?x\r\n\r\n",), 400, "invalid_http"),
        ((POST, b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabc"), 400, "invalid_http"),
        ((POST, b"Transfer-Encoding: chunked\r\n\r\nzz\r\nabc\r\n"), 400, "invalid_http"),
        ((GET, b"X: a\x01b\r\n\r\n"), 400, "invalid_http"),
        ((GET, b"X: " + b"a" * 17_000 + b"\r\n\r\n"), 431, "headers_too_large"),
        ((GET, b"X: " + b"a" * 60_000 + b"\r\n\r\n"), 431, "headers_too_large"),
        ((GET, WEBSOCKET), 400, "unsupported_upgrade"),
        ((b"OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n",), 404, "not_found"),
        ((b"CONNECT x:80 HTTP/1.1\r\nHost: x:80\r\n\r\n",), 404, "not_found"),
        ((GET.replace(b"models", b"none"), b"\r\n"), 404, "not_found"),
        ((GET.replace(b"v1/models", b"-/routes"), b"\r\n"), 404, "not_found"),
        ((GET.replace(b"v1/models", b"-/healthz"), b"\r\n"), 404, "not_found"),
    ],
)
def test_every_refusal_has_the_one_shape(
    server: Serving, parts: tuple[bytes, ...], status: int, code: str
) -> None:
    assert_refused(ask(server, *parts), status, code)


def test_an_unknown_transfer_encoding_is_not_supported(server: Serving) -> None:
    found, headers, body = ask(server, POST, b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n")
    assert (found, json.loads(body)["error"]["code"]) == (501, "not_implemented")
    assert [value for name, value in headers if name == "content-type"] == ["application/json"]


def test_the_proxy_keeps_its_files_in_the_folder_of_the_cluster(server: Serving) -> None:
    """Which `stop_all` removes."""
    folder = server.cluster.folder / "h"
    assert {file.name for file in folder.glob("*/*")} >= {"haproxy.cfg", "admin.sock"}


def test_the_proxys_last_resort_is_of_this_cluster(server: Serving) -> None:
    """Not what listens on the fixed port that is Serve's default, which may be another cluster."""
    (file,) = (server.cluster.folder / "h").glob("*/haproxy.cfg")
    ports = re.findall(
        r"^ *server .*fallback.* 127\.0\.0\.1:(\d+) check backup", file.read_text(), re.MULTILINE
    )
    assert ports and "8500" not in ports


@pytest.mark.parametrize(("path", "status"), [(b"/v1/models", 200), (b"/none", 404), (b"/health", 200)])
@pytest.mark.parametrize(
    ("sent", "shown"),
    [(b"", OWN_ID), (b"bench-1_a.b", "bench-1_a.b"), (b"a b", OWN_ID), (b"x" * 65, OWN_ID)],
)
def test_there_is_one_request_id(server: Serving, path: bytes, status: int, sent: bytes, shown: str) -> None:
    line = b"X-Request-Id: " + sent + b"\r\n" if sent else b""
    found, headers, _ = ask(server, b"GET " + path + b" HTTP/1.1\r\nHost: a\r\n", line, b"\r\n")
    assert found == status
    (id,) = [value for name, value in headers if name == "x-request-id"]
    assert re.fullmatch(shown, id)


@pytest.mark.parametrize(
    ("asked", "status", "code"),
    [
        (b"0.001", 504, "deadline_exceeded"),
        (b"0.3", 504, "deadline_exceeded"),
        (b"0", 400, "invalid_header"),
        (b"soon", 400, "invalid_header"),
    ],
)
def test_a_clients_time_limit_is_kept_by_the_router(
    server: Serving, asked: bytes, status: int, code: str
) -> None:
    length = b"Content-Length: %d\r\n" % len(BODY)
    limit = b"X-Request-Timeout-Seconds: " + asked + b"\r\n\r\n"
    found, _, body = ask(server, POST, length, limit, BODY)
    assert (found, json.loads(body)["error"]["code"]) == (status, code)
