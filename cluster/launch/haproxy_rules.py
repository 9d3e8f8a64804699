"""What HAProxy says to clients by itself, and which headers it passes on.

Errors that it finds, or that Serve's proxy answers in plain text, have the API's error shape. Three levels:

- `http-error` lines, for what HAProxy finds once it has read a request;
- `http-response` rules, for plain text of Serve: while no application is deployed or no router replica runs
  (during start and stop) Serve answers 404 to every path, as if the client had asked for something wrong.
  Here it is 503. (The router's own errors are JSON and pass.);
- texts inside the binary, for bytes that are no HTTP: HAProxy 2.8 answers those from constants that no option
  reaches. The wrapper runs a copy of the binary in which they are replaced, by texts of the same length.

Serve's own pages under `/-/` (health, routes) are not for clients: 404, as for every unknown path. (Serve
asks the health of replicas on their own ports.) KubeRay does ask HAProxy for `/-/healthz` and sends requests
only where it is answered, so it can be opened.

Headers: `x-request-id` is the client's when it is harmless, else HAProxy's, and comes back exactly once
(Serve adds one beside the router's). `x-request-timeout-seconds` is the router's to keep: Serve would end
such a request with plain text, so it goes on under a name that Serve does not know. `host` may be missing
from HTTP/1.0 only (RFC 9112, 3.2). A header block of up to 64 KB goes on to the router, which refuses it
properly; HAProxy's own limit can only say "invalid" (beyond it, or above 1000 headers, HAProxy has not
understood the request and has one answer for all such: 400).
"""

from __future__ import annotations

import json
from http import HTTPStatus

from router.api.errors import ApiError
from router.settings import PASSED_TIMEOUT_HEADER, TIMEOUT_HEADER

_BUFFER_BYTES = 64 << 10  # longest header block
_MAX_HEADERS = 1000
_RETRY = {"retry-after": "5"}

_NOT_FOUND = ApiError(404, "There is no such route.", code="not_found")
_NO_UPGRADE = ApiError(400, "WebSocket connections are not supported.", code="unsupported_upgrade")
_NO_APPLICATION = ApiError(503, "The server is starting or stopping.", code="no_application", headers=_RETRY)
_NO_ROUTER = ApiError(503, "No router can be reached now.", code="no_router", headers=_RETRY)
_FAILED = ApiError(500, "The server failed on this request.", code="internal_error")
_INVALID = ApiError(400, "The request is not valid HTTP.", code="invalid_http")
_TOO_LATE = ApiError(504, "The request took too long.", code="deadline_exceeded")
_ERRORS = (
    _INVALID,
    ApiError(403, "The request is not allowed.", code="forbidden"),
    ApiError(408, "The request did not arrive in time.", code="request_timeout"),
    ApiError(413, "The request is too large.", code="body_too_large"),
    _FAILED,
    ApiError(501, "The request needs something that is not supported.", code="not_implemented"),
    ApiError(502, "The router ended before it had answered.", code="no_router", headers=_RETRY),
    _NO_ROUTER,
    ApiError(504, "The router did not answer in time.", code="router_timeout"),
)
# Answers inside the binary: status line there, error (short: there is no room for more). HAProxy says 422 to
# a Transfer-Encoding that it does not know, for which HTTP has 501.
_COMPILED = (
    ("400 Bad request", ApiError(400, "not valid HTTP", code="invalid_http")),
    ("408 Request Time-out", ApiError(408, "The request did not arrive in time.", code="request_timeout")),
    ("422 Unprocessable Content", ApiError(501, "not supported", code="not_implemented")),
    ("500 Internal Server Error", ApiError(500, "server error", code="internal_error")),
    ("501 Not Implemented", ApiError(501, "not supported", code="not_implemented")),
)
# Status of a plain text answer of Serve -> what it means here.
_OF_PLAIN = {400: _INVALID, 404: _NO_APPLICATION, 408: _TOO_LATE, 500: _FAILED, 503: _NO_ROUTER}
_PLAIN = "{ res.hdr(content-type) -m beg text/plain }"


def sed_script(*, open_health: bool = False) -> str:
    """Edits of the config that Serve wrote, for `sed -f`. open_health: clients may ask for `/-/healthz`."""
    exception = " !{ path /-/healthz }" if open_health else ""
    frontend = [
        "unique-id-format %[uuid]",
        "acl has_good_id req.fhdr(x-request-id) -m reg ^[A-Za-z0-9._-]{1,64}$",
        "acl has_one_id req.fhdr_cnt(x-request-id) eq 1",
        "http-request set-header x-request-id %[unique-id] unless has_one_id has_good_id",
        "http-request set-var(txn.request_id) req.fhdr(x-request-id)",
        "http-after-response set-header x-request-id %[unique-id]",
        "http-after-response set-header x-request-id %[var(txn.request_id)] "
        "if { var(txn.request_id) -m found }",
        f"http-request set-header {PASSED_TIMEOUT_HEADER} %[req.fhdr({TIMEOUT_HEADER})] "
        f"if {{ req.fhdr({TIMEOUT_HEADER}) -m found }}",
        f"http-request del-header {TIMEOUT_HEADER}",
        f"http-request return {_reply(_NOT_FOUND)} if {{ path,url_dec -m beg -i /-/ }}{exception}",
        f"http-request return {_reply(_NOT_FOUND)} unless {{ path -m beg / }}",  # OPTIONS *, CONNECT
        f"http-request return {_reply(_INVALID)} unless {{ req.hdr(host) -m found }} or HTTP_1.0",
        f"http-request return {_reply(_NO_UPGRADE)} if {{ req.hdr(upgrade) -i websocket }}",
    ]
    from_serve = [
        f"http-response return {_reply(error)} if {{ status {status} }} {_PLAIN}"
        for status, error in _OF_PLAIN.items()
    ]
    return "\n".join(
        [
            # Clients' own port stays where http_options.host has it, which is `*:` too for all interfaces.
            r"/^listen stats/,$ s/^\( *bind \)\*:/\1127.0.0.1:/",
            r"/^frontend prometheus/,/^frontend http/ s/^\( *bind \):/\1127.0.0.1:/",
            rf"s/^\( *tune.bufsize \).*/\1{_BUFFER_BYTES}/",
            *_added("/^global/a", [f"tune.http.maxhdr {_MAX_HEADERS}"]),
            "/^ *errorfile /d",
            *_added("/^defaults/a", [f"http-error {_reply(error)}" for error in _ERRORS]),
            *_added("/^ *timeout client /i", ["timeout http-request 10s"]),
            *_added("/^frontend http_frontend/a", frontend),
            *_added("/^ *server SERVE_PROXY_ACTOR-fallback/i", from_serve),
            "",
        ]
    )


def sed_script_without_application() -> str:
    """One more edit, of a config that routes to no application."""
    rule = f"http-request return {_reply(_NO_APPLICATION)}".replace("\\", r"\\")
    return rf"s|^\( *\)http-request return status 404 .*not found\. Ping .*|\1{rule}|" + "\n"


def with_own_answers(binary: bytes) -> bytes:
    """HAProxy's program with its compiled answers in our shape. One that is not found, or not only once (in
    another version), stays."""
    for status, error in _COMPILED:
        begin = f"HTTP/1.1 {status}\r\nContent-length: ".encode()
        start = binary.find(begin)
        if start < 0 or binary.find(begin, start + 1) >= 0:
            continue
        end = binary.index(b"\0", start)
        binary = binary[:start] + _compiled(status, error, end - start) + binary[end:]
    return binary


def _compiled(status: str, error: ApiError, num_bytes: int) -> bytes:
    """A whole answer of exactly so many bytes; spaces after the JSON fill it."""
    line = f"{error.status} {HTTPStatus(error.status).phrase}" if error.status != int(status[:3]) else status
    head = f"HTTP/1.1 {line}\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: "
    body = json.dumps(json.loads(error.body()), separators=(",", ":")).encode("ascii")
    room = num_bytes - len(head) - len("123\r\n\r\n")
    assert len(body) <= room <= 999, (status, len(body), room)
    return f"{head}{room:03d}\r\n\r\n".encode() + body.ljust(room)


def _reply(error: ApiError) -> str:
    """HAProxy's words for an answer."""
    headers = "".join(f" hdr {name} {value}" for name, value in error.headers.items())
    body = error.body().decode("ascii").replace('"', r"\"")
    return f'status {error.status} content-type application/json string "{body}"{headers}'


def _added(command: str, lines: list[str]) -> list[str]:
    """sed's command that adds lines to the config."""
    escaped = [line.replace("\\", r"\\") for line in lines]
    return [f"{command}\\", *(line + "\\" for line in escaped[:-1]), escaped[-1]]
