"""What every HTTP request passes before any route: the ASGI layer around the application.

Default deny: with API keys configured, every path but /health needs one, known or not. The decision reads
`scope["path"]`, never a URL built from headers. Also here: request ids, header limits, CORS, clients that
left, and the last resort for errors, so that every answer has the one error shape.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any

from router.api.auth import ApiKeys, Caller
from router.api.errors import ApiError, internal_error, invalid
from router.api.json_body import ClientDisconnected
from router.settings import RouterSettings
from router.telemetry.metrics import RouterMetrics
from router.telemetry.table import CLIENT_ERRORS, DISCONNECTS, SERVER_ERRORS

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
RawHeaders = list[tuple[bytes, bytes]]

_INTERNAL_PREFIX = b"x-tandem-"  # nothing of tenant, priority or placement is settable from outside
_CLIENT_CLOSED_STATUS = 499  # nobody reads it; access logs do
_OPEN_PATHS = frozenset({"/health"})
_CLIENT_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_HOST = re.compile(rb"[A-Za-z0-9._~-]+(:\d{1,5})?|\[[0-9A-Fa-f:.]+\](:\d{1,5})?")
_HEADER_NAMES = re.compile(rb"[A-Za-z0-9-]+(?:\s*,\s*[A-Za-z0-9-]+)*")

_log = logging.getLogger(__name__)


class Gate:
    """Wraps an ASGI application. `scope["state"]` carries `request_id` and `caller` to the routes."""

    def __init__(
        self,
        app: App,
        *,
        settings: RouterSettings,
        keys: ApiKeys,
        metrics: RouterMetrics,
        new_id: Callable[[], str],
    ) -> None:
        self._app = app
        self._settings = settings
        self._keys = keys
        self._metrics = metrics
        self._new_id = new_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await _refuse_websocket(scope, send)
            return
        headers: RawHeaders = list(scope["headers"])
        request_id = self._new_id()
        shown_id = _client_id(headers) or request_id.encode("ascii")
        is_head = scope["method"] == "HEAD"
        if is_head:  # as GET, without the body
            scope = {**scope, "method": "GET"}
        extra: RawHeaders = [(b"x-request-id", shown_id), *self._cors(headers)]
        has_started = is_disconnected = False

        async def send_with_headers(message: Message) -> None:
            nonlocal has_started, is_disconnected
            if message["type"] == "http.response.start":
                has_started = True
                message["headers"] = [*message.get("headers", ()), *extra]
            elif is_head and message["type"] == "http.response.body":
                message["body"] = b""
            try:
                await send(message)
            except (OSError, RuntimeError) as error:  # a lost connection: ASGI's exception, and uvloop's
                is_disconnected = True
                raise ClientDisconnected from error

        try:
            _check_headers(headers, self._settings.max_header_bytes)
            if scope["method"] == "OPTIONS":
                await _respond(send_with_headers, 204, b"", [(b"allow", b"GET, POST, OPTIONS")])
                return
            caller = Caller()
            if scope["path"] not in _OPEN_PATHS:
                caller = self._keys.caller(_one(headers, b"authorization"))
            scope.setdefault("state", {}).update(request_id=request_id, caller=caller)
            await self._app(scope, receive, send_with_headers)
        except ApiError as error:
            count_error(self._metrics, error)
            await _respond(send_with_headers, error.status, error.body(), _error_headers(error))
        except asyncio.CancelledError:  # what Serve does with a request whose client has left
            self._count_leaving(has_started)
            raise
        except ClientDisconnected:
            self._count_leaving(has_started)
            if not has_started:
                await _respond(send_with_headers, _CLIENT_CLOSED_STATUS, b"", [])
        except Exception:
            if is_disconnected:
                self._count_leaving(has_started)
                return
            _log.exception("request %s (x-request-id %s) failed", request_id, shown_id.decode("ascii"))
            if has_started:
                raise  # the server closes the connection: the answer is visibly incomplete
            fault = internal_error()
            count_error(self._metrics, fault)
            await _respond(send_with_headers, fault.status, fault.body(), _error_headers(fault))

    def _count_leaving(self, has_started: bool) -> None:
        self._metrics.count(DISCONNECTS, 1, "answering" if has_started else "waiting")

    def _cors(self, headers: RawHeaders) -> RawHeaders:
        """CORS headers of the answer: none unless the browser's origin is configured. Never credentials."""
        origin = _one(headers, b"origin")
        allowed = self._settings.cors_origins
        if origin is None or not allowed:
            return []
        if "*" in allowed:
            shown = b"*"
        elif origin.decode("latin-1") in allowed:
            shown = origin
        else:
            return [(b"vary", b"Origin")]
        cors = [
            (b"access-control-allow-origin", shown),
            (b"access-control-expose-headers", b"x-request-id, retry-after"),
            (b"vary", b"Origin"),
        ]
        if _one(headers, b"access-control-request-method") is not None:
            cors += [
                (b"access-control-allow-methods", b"GET, POST, OPTIONS"),
                (b"access-control-max-age", b"600"),
            ]
            wanted = _one(headers, b"access-control-request-headers")
            if wanted is not None and _HEADER_NAMES.fullmatch(wanted):
                cors.append((b"access-control-allow-headers", wanted))
        return cors


def count_error(metrics: RouterMetrics, error: ApiError) -> None:
    """Counts an error once, where it is answered."""
    metrics.count(CLIENT_ERRORS if error.status < 500 else SERVER_ERRORS, 1, error.code)


def _error_headers(error: ApiError) -> RawHeaders:
    """The headers of an error's answer."""
    own = [(name.encode("ascii"), value.encode("latin-1")) for name, value in error.headers.items()]
    return [(b"content-type", b"application/json"), *own]


def _client_id(headers: RawHeaders) -> bytes | None:
    """The client's own request id, if it is harmless. Shown back to it; never used inside."""
    value = _one(headers, b"x-request-id")
    return value if value is not None and _CLIENT_ID.fullmatch(value) else None


def _one(headers: RawHeaders, name: bytes) -> bytes | None:
    return next((value for key, value in headers if key == name), None)


def _check_headers(headers: RawHeaders, max_bytes: int) -> None:
    if sum(len(name) + len(value) + 4 for name, value in headers) > max_bytes:
        raise ApiError(431, f"The headers are larger than {max_bytes} bytes.", code="headers_too_large")
    for name in (b"host", b"content-length", b"authorization"):
        if sum(key == name for key, _ in headers) > 1:
            raise invalid(f"The header {name.decode('ascii')} is there twice.", code="invalid_header")
    if any(name.startswith(_INTERNAL_PREFIX) for name, _ in headers):
        raise invalid("Headers that begin with x-tandem- are not for clients.", code="invalid_header")
    host = _one(headers, b"host")
    if host is not None and not _HOST.fullmatch(host):
        raise invalid("The Host header is no host name.", code="invalid_header")


async def _refuse_websocket(scope: Scope, send: Send) -> None:
    """An answer in place of the upgrade, where the server can give one with a body."""
    if "websocket.http.response" not in (scope.get("extensions") or {}):
        await send({"type": "websocket.close", "code": 1008})
        return
    error = invalid("WebSocket connections are not supported.", code="unsupported_upgrade")
    headers = [*_error_headers(error), (b"content-length", str(len(error.body())).encode("ascii"))]
    await send({"type": "websocket.http.response.start", "status": error.status, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": error.body()})


async def _respond(send: Send, status: int, body: bytes, headers: RawHeaders) -> None:
    length = (b"content-length", str(len(body)).encode("ascii"))
    start_headers = headers if status == 204 else [*headers, length]
    with suppress(ClientDisconnected):
        await send({"type": "http.response.start", "status": status, "headers": start_headers})
        await send({"type": "http.response.body", "body": body})
