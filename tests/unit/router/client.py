"""Calls to an application without a socket, and a server on a loopback port for what needs one."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

from router.telemetry.metrics import RouterMetrics
from router.telemetry.table import DISCONNECT_STAGES, DISCONNECTS
from tests.unit.router.fakes import Stack

JSON = {"content-type": "application/json"}
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def call(
    app: FastAPI,
    path: str,
    body: object = None,
    *,
    method: str | None = None,
    raw: bytes | None = None,
    headers: Mapping[str, str | bytes] | None = None,
) -> httpx.Response:
    """One request. `body` is sent as JSON, `raw` as it is; GET without either."""

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
            content = raw if raw is not None else None if body is None else json.dumps(body).encode()
            verb = method or ("GET" if content is None else "POST")
            own: Mapping[str, str | bytes] = JSON if content is not None else {}
            sent: Any = {**own, **(headers or {})}  # httpx takes bytes as values too
            return await client.request(verb, path, content=content, headers=sent)

    return asyncio.run(asyncio.wait_for(send(), 30))


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error object, after checking that the answer has exactly the one shape."""
    body = strict(response.content)
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert response.headers["x-request-id"]
    assert response.headers["content-type"] == "application/json"
    error = body["error"]
    assert isinstance(error, dict)
    return error


def strict(text: str | bytes) -> Any:
    """JSON as RFC 8259 has it: no NaN, no Infinity."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} in {text!r}")

    return json.loads(text, parse_constant=refuse)


def events(text: str) -> list[Any]:
    """The data of a stream's events, parsed; `[DONE]` as it is. Every event must be `data: ...`."""
    assert text.endswith("\n\n")
    found: list[Any] = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        if block.startswith(":"):
            continue
        assert block.startswith("data: ") and "\n" not in block, block
        data = block.removeprefix("data: ")
        found.append(data if data == "[DONE]" else strict(data))
    return found


def streamed_text(found: list[Any], index: int = 0) -> str:
    """The joined text of one choice of a stream."""
    text = ""
    for event in found:
        for choice in event["choices"] if event != "[DONE]" else ():
            if choice["index"] == index:
                text += choice["delta"].get("content", "") if "delta" in choice else choice["text"]
    return text


@contextmanager
def server(stack: Stack[Any]) -> Iterator[str]:
    """The application behind uvicorn on a free loopback port; gives its base URL."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        config = uvicorn.Config(stack.app, log_level="warning", lifespan="off")
        instance = uvicorn.Server(config)
        thread = threading.Thread(target=instance.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        wait_until(lambda: instance.started)
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            instance.should_exit = True
            thread.join(10)
            assert not thread.is_alive()


async def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Returns when the condition holds, letting the event loop run; fails after the time."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - what is watched knows no events
            await asyncio.sleep(0.001)


def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Returns when the condition holds; fails after the time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.005)


def disconnects(metrics: RouterMetrics) -> float:
    """Clients that have left, at whatever stage."""
    return sum(metrics.value(DISCONNECTS, stage) for stage in DISCONNECT_STAGES)
