"""Groups that fail or refuse, clients that leave, queues that are full."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from router.dispatch.interface import Unavailable
from router.telemetry import table
from router.text.text_workers import TextWorkers
from tests.unit.router.client import (
    CHAT,
    COMPLETIONS,
    call,
    disconnects,
    error_of,
    events,
    server,
    streamed_text,
    until,
    wait_until,
)
from tests.unit.router.fakes import FakeDispatcher, chunks_of, says, stack
from workers.types import FinishReason, TokenChunk

HI = [{"role": "user", "content": "hi"}]


def fails(code: str, *, after: int) -> Any:
    """A script that ends with an error chunk after some tokens."""

    def script(request: Any) -> Any:
        chunks = chunks_of(request, [75] * 9)
        for _ in range(after):
            yield next(chunks)
        yield TokenChunk(
            request_id=request.request_id,
            choice=0,
            finish_reason=FinishReason.ERROR,
            error="rank 1 died",
            error_code=code,
        )

    return script


@pytest.mark.parametrize(
    ("said", "status", "code"),
    [
        ("engine_dead", 503, "engine_dead"),
        ("group_stopped", 503, "group_stopped"),
        ("group_distrusted", 503, "group_distrusted"),
        ("router_stopping", 503, "router_stopping"),
        ("queue_full", 503, "server_is_overloaded"),
        ("invalid_value", 400, "invalid_value"),
        ("context_length_exceeded", 400, "context_length_exceeded"),
        ("nonfinite_logits", 500, "nonfinite_logits"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_group_error_before_the_first_token(said: str, status: int, code: str, stream: bool) -> None:
    router = stack(FakeDispatcher(fails(said, after=0)))
    response = call(router.app, COMPLETIONS, {"prompt": "a", "stream": stream})
    error = error_of(response)
    assert (response.status_code, error["code"], error["message"]) == (status, code, "rank 1 died")
    if status == 503:
        assert error["type"] == "service_unavailable_error"
        assert int(response.headers["retry-after"]) >= 1
        assert response.headers["x-should-retry"] == "true"
    if status == 500:
        assert response.headers["x-should-retry"] == "false"
    counter = table.CLIENT_ERRORS if status == 400 else table.SERVER_ERRORS
    assert router.service.metrics.value(counter, code) == 1
    assert router.service.metrics.value(table.REQUESTS, "error") == 1
    assert router.service.admission.num_inflight == 0


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_group_error_in_a_stream(path: str) -> None:
    router = stack(FakeDispatcher(fails("engine_dead", after=2)))
    body = {"stream": True, **({"messages": HI} if path == CHAT else {"prompt": "a"})}
    response = call(router.app, path, body)
    found = events(response.text)
    assert response.status_code == 200
    assert streamed_text(found[:-1]) == "ii"
    assert found[-1] == {
        "error": {
            "message": "rank 1 died",
            "type": "service_unavailable_error",
            "param": None,
            "code": "engine_dead",
        }
    }
    assert router.service.metrics.value(table.SERVER_ERRORS, "engine_dead") == 1
    assert router.service.metrics.value(table.GENERATION_TOKENS) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_no_group_takes_it(stream: bool) -> None:
    error = Unavailable("every group is full", retry_after_s=7.2)
    router = stack(FakeDispatcher(error=error))
    for prompt in ("a", ["a", "b"]):
        response = call(router.app, COMPLETIONS, {"prompt": prompt, "stream": stream})
        assert (response.status_code, error_of(response)["code"]) == (503, "server_is_overloaded")
        assert 0.75 * 7200 <= int(response.headers["retry-after-ms"]) <= 1.25 * 7200
        assert 5 <= int(response.headers["retry-after"]) <= 9


def test_our_own_fault_says_nothing_of_the_inside(caplog: pytest.LogCaptureFixture) -> None:
    router = stack(FakeDispatcher(error=RuntimeError("secret /path")))
    response = call(router.app, COMPLETIONS, {"prompt": "my prompt"})
    assert (response.status_code, error_of(response)["code"]) == (500, "internal_error")
    assert "secret" not in response.text and "my prompt" not in response.text
    assert "secret" in caplog.text and "my prompt" not in caplog.text


def test_full_queue_and_draining() -> None:
    async def run() -> None:
        gate = asyncio.Semaphore(0)
        router = stack(FakeDispatcher(gate=gate), max_queued_requests=2)
        transport = httpx.ASGITransport(app=router.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
            waiting = [asyncio.create_task(client.post(COMPLETIONS, json={"prompt": "a"})) for _ in range(2)]
            await until(lambda: router.service.admission.num_queued == 2)
            began_at = time.monotonic()
            refused = await client.post(COMPLETIONS, json={"prompt": "a"})
            assert time.monotonic() - began_at < 0.5
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_is_overloaded")
            assert float(refused.headers["retry-after-ms"]) > 0
            for _ in range(100):
                gate.release()
            assert [(await task).status_code for task in waiting] == [200, 200]
            assert (await client.post(COMPLETIONS, json={"prompt": "a"})).status_code == 200
            router.service.start_draining()
            drained = await client.post(COMPLETIONS, json={"prompt": "a"})
            assert (drained.status_code, drained.json()["error"]["code"]) == (503, "draining")
            assert (await client.get("/ready")).status_code == 503
        assert router.service.admission.num_inflight == 0

    asyncio.run(asyncio.wait_for(run(), 20))


def test_own_limit_of_a_key(tmp_path: Any) -> None:
    async def run() -> None:
        keys = tmp_path / "keys"
        keys.write_text("alpha\nbeta\n")
        keys.chmod(0o600)
        gate = asyncio.Semaphore(0)
        router = stack(FakeDispatcher(gate=gate), api_keys_file=str(keys), max_requests_per_key=1)
        transport = httpx.ASGITransport(app=router.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:

            def post(key: str) -> Any:
                return client.post(
                    COMPLETIONS, json={"prompt": "a"}, headers={"authorization": f"Bearer {key}"}
                )

            first = asyncio.create_task(post("alpha"))
            await until(lambda: router.service.admission.num_queued == 1)
            refused = await post("alpha")
            assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
            assert "retry-after" in refused.headers
            other = asyncio.create_task(post("beta"))
            for _ in range(100):
                gate.release()
            assert (await other).status_code == (await first).status_code == 200

    asyncio.run(asyncio.wait_for(run(), 20))


def send_and_leave(
    url: str,
    body: dict[str, Any],
    *,
    after: bytes | None,
    half_close: bool = False,
    once: Callable[[], bool] = lambda: True,
) -> None:
    """Sends a request on a plain socket and closes it, once `after` has come back and `once` is true."""
    host, port = url.removeprefix("http://").split(":")
    raw = json.dumps(body).encode()
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            + f"Content-Length: {len(raw)}\r\n\r\n".encode()
            + raw
        )
        seen = b""
        while after is not None and after not in seen:
            seen += connection.recv(4096)
        wait_until(once)
        if half_close:
            connection.shutdown(socket.SHUT_WR)
            connection.settimeout(5)
            while connection.recv(4096):
                pass
        else:
            time.sleep(0.05)


@pytest.mark.parametrize("half_close", [False, True])
@pytest.mark.parametrize("prompt", ["a", ["a", "b"]])
@pytest.mark.parametrize("stream", [False, True])
def test_client_leaves(stream: bool, prompt: Any, half_close: bool) -> None:
    endless = says("x" * 3000)
    router = stack(FakeDispatcher(endless, gate=asyncio.Semaphore(20)))
    count = len(prompt)
    with server(router) as url:
        body = {"prompt": prompt, "max_tokens": 3000, "stream": stream}
        # A plain request, and one in the queue, give nothing back before the client leaves.
        after = b'"text":"x"' if stream else None
        is_placed = lambda: len(router.dispatcher.requests) == count  # noqa: E731
        send_and_leave(url, body, after=after, half_close=half_close, once=is_placed)
        wait_until(lambda: router.dispatcher.num_cancelled == count)
        assert router.dispatcher.num_open == 0
        wait_until(lambda: disconnects(router.service.metrics) == 1)
        assert router.service.metrics.value(table.REQUESTS, "aborted") == 1
        assert router.service.admission.num_inflight == 0
    router.service.close()


def test_waiting_to_be_tokenized_ends_with_the_client_and_with_its_deadline() -> None:
    router = stack()
    router.service._preparer._workers = TextWorkers(0, max_calls=10)
    with server(router) as url:
        send_and_leave(url, {"prompt": "a"}, after=None)
        wait_until(lambda: disconnects(router.service.metrics) == 1)
        late = httpx.post(
            url + COMPLETIONS, json={"prompt": "a"}, headers={"x-request-timeout-seconds": "0.05"}, timeout=5
        )
    assert (late.status_code, error_of(late)["code"]) == (504, "deadline_exceeded")
    assert error_of(late)["message"] == "The request took longer than 0.05 s."
    assert router.dispatcher.requests == []


def test_client_leaves_the_queue() -> None:
    router = stack(FakeDispatcher(gate=asyncio.Semaphore(0)))
    with server(router) as url:
        for count, stream in enumerate((False, True), 1):
            is_placed = lambda: len(router.dispatcher.requests) == count  # noqa: B023, E731
            send_and_leave(url, {"prompt": "a", "stream": stream}, after=None, once=is_placed)
        wait_until(lambda: router.dispatcher.num_cancelled == 2)
        wait_until(lambda: router.service.metrics.value(table.REQUESTS, "aborted") == 2)
        assert router.service.admission.num_queued == 0
        assert sum(router.service.metrics.ttft_s.counts) == 0


def test_silent_stream_gets_comments_and_then_its_error() -> None:
    gate = asyncio.Semaphore(0)
    router = stack(FakeDispatcher(gate=gate), keep_alive_s=0.1, max_request_s=0.4)
    with server(router) as url:
        response = httpx.post(url + COMPLETIONS, json={"prompt": "a", "stream": True}, timeout=10)
    assert response.status_code == 200
    assert response.text.startswith(": keep-alive\n\n")
    assert response.text.count(": keep-alive") >= 2
    assert events(response.text)[-1]["error"]["code"] == "deadline_exceeded"
    assert router.dispatcher.num_open == 0


def test_too_long_whole_answer() -> None:
    router = stack(FakeDispatcher(gate=asyncio.Semaphore(0)), max_request_s=0.1)
    response = call(router.app, COMPLETIONS, {"prompt": "a"})
    assert (response.status_code, error_of(response)["code"]) == (504, "deadline_exceeded")
    assert router.dispatcher.num_open == 0


@pytest.mark.parametrize("stream", [False, True])
def test_deadline_of_the_client(stream: bool) -> None:
    router = stack(FakeDispatcher(gate=asyncio.Semaphore(0)))
    body = {"prompt": "a", "stream": stream}
    response = call(router.app, COMPLETIONS, body, headers={"x-request-timeout-seconds": "0.1"})
    assert (response.status_code, error_of(response)["code"]) == (504, "deadline_exceeded")
    assert router.dispatcher.num_open == 0


@pytest.mark.parametrize(
    ("asked", "status"),
    [("0", 400), ("-1", 400), ("nan", 400), ("inf", 400), ("soon", 400), ("", 400), ("1000000000", 504)],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_deadlines_that_are_none_and_the_servers_own(path: str, asked: str, status: int) -> None:
    router = stack(FakeDispatcher(gate=asyncio.Semaphore(0)), max_request_s=0.1)
    body = {"messages": HI} if path == CHAT else {"prompt": "a"}
    response = call(router.app, path, body, headers={"x-request-timeout-seconds": asked})
    code = "invalid_header" if status == 400 else "deadline_exceeded"
    assert (response.status_code, error_of(response)["code"]) == (status, code)


def test_slow_body() -> None:
    router = stack(body_timeout_s=0.2)
    with server(router) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=5) as connection:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                b"Content-Length: 100\r\n\r\n{"
            )
            assert connection.recv(4096).startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("error", [ConnectionResetError("gone"), RuntimeError("the handler is closed")])
@pytest.mark.parametrize("num_taken", [0, 1, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_a_connection_that_breaks_while_writing_is_no_fault_of_ours(
    error: Exception, num_taken: int, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    router = stack()
    body = json.dumps({"prompt": "a", "stream": stream}).encode()
    received = [{"type": "http.request", "body": body}]
    num_sent = 0

    async def receive() -> Any:
        if not received:
            await asyncio.Event().wait()
        return received.pop()

    async def send(_: Any) -> None:
        nonlocal num_sent
        if num_sent == num_taken:
            raise error
        num_sent += 1

    scope = {
        "type": "http",
        "method": "POST",
        "path": COMPLETIONS,
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }
    asyncio.run(asyncio.wait_for(router.app(scope, receive, send), 10))
    metrics = router.service.metrics
    assert metrics.value(table.SERVER_ERRORS, "internal_error") == 0
    assert disconnects(metrics) == (0 if num_taken == 2 and not stream else 1)
    assert (router.service.admission.num_inflight, router.dispatcher.num_open) == (0, 0)
    assert "failed" not in caplog.text


@pytest.mark.parametrize("stream", [False, True])
def test_a_cancelled_request_is_a_client_that_left(stream: bool) -> None:
    """Serve cancels a request in the moment in which it hears that the client has gone."""
    router = stack(FakeDispatcher(gate=asyncio.Semaphore(2)))
    body = json.dumps({"prompt": "a", "stream": stream}).encode()
    received = [{"type": "http.request", "body": body}]
    has_gone = asyncio.Event()

    async def receive() -> Any:
        if not received:
            await has_gone.wait()
            return {"type": "http.disconnect"}
        return received.pop()

    async def send(_: Any) -> None: ...

    async def run() -> None:
        scope = {
            "type": "http",
            "method": "POST",
            "path": COMPLETIONS,
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
        }
        task = asyncio.ensure_future(router.app(scope, receive, send))
        while not router.dispatcher.num_open:  # noqa: ASYNC110 (a state of the fake)
            await asyncio.sleep(0.01)
        has_gone.set()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(asyncio.wait_for(run(), 10))
    metrics = router.service.metrics
    assert (disconnects(metrics), metrics.value(table.REQUESTS, "aborted")) == (1, 1)
    assert (router.service.admission.num_inflight, router.dispatcher.num_open) == (0, 0)
