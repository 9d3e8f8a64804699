"""Requests byte by byte, and the one shape of a refusal."""

from __future__ import annotations

import http.client
import json
import socket

from tests.integration.serving import Serving

GET = b"GET /v1/models HTTP/1.1\r\nHost: a\r\n"
Answer = tuple[int, list[tuple[str, str]], bytes]


def ask(server: Serving, *parts: bytes) -> Answer:
    """Status, headers and body of the answer to some bytes."""
    port = int(server.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(b"".join(parts))
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        headers = [(name.lower(), value) for name, value in answer.getheaders()]
        return answer.status, headers, answer.read()


def assert_refused(answer: Answer, status: int, code: str) -> None:
    """As the client's mistake, by whichever part of the service."""
    found, headers, body = answer
    error = json.loads(body)["error"]
    assert (found, error["code"]) == (status, code)
    assert (error["type"], error["param"]) == ("invalid_request_error", None)
    assert [value for name, value in headers if name == "content-type"] == ["application/json"]
    assert len([name for name, _ in headers if name == "x-request-id"]) <= 1
