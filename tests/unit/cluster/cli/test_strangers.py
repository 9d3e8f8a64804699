"""Every command that asks another program, at an address where something else answers, or answers half."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console

from cluster.bench.client import CompletionClient
from cluster.cli import tables
from cluster.replies import ask
from tests.unit.cluster.conftest import World

COMMANDS = {
    "status": "status --dashboard URL",
    "down": "down --dashboard URL --timeout-s 1",
    "explain": "explain 0123 --url URL",
    "chat": "chat --url URL",
    "check": "dashboards check --prometheus URL",
    "preview": "dashboards preview --prometheus URL -o FOLDER/page.html",
    "push": "dashboards push --grafana URL --token-file FOLDER/token",
}
DEEP = b"[" * 100_000
STEERING = json.dumps({"error": {"message": "red \x1b[31m, \x9b, \x07"}}, ensure_ascii=False).encode()
ANSWERS = {
    "deep": (200, DEEP),
    "deep refusal": (418, DEEP),
    "a list": (200, b"[1]"),
    "no text": (200, b"\xff\xfe"),
    "odd deployments": (200, b'{"applications": {"a": {"deployments": [1]}}}'),
    "odd applications": (200, b'{"applications": {"a": {"deployments": 5}}, "http_options": 3}'),
    "steering": (418, STEERING),
    "steering lines": (500, b"\x1b[2J\r\n\x07"),
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_host_that_no_name_can_be_is_refused(world: World, tmp_path: Path, command: str) -> None:
    arguments = command.replace("URL", "http://127..0.1:8000").replace("FOLDER", str(tmp_path)).split()
    done = world.run(*arguments)
    assert (done.exit_code, "it must be like http://HOST:PORT" in done.output) == (2, True), done.output


@contextmanager
def answering(status: int, body: bytes, *, slow: threading.Event | None = None) -> Iterator[str]:
    """A server that gives everybody the same. `slow`: after the body spaces, one after the other, until it
    is set."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body) if slow is None else 1 << 40))
            self.end_headers()
            self.wfile.write(body)
            while slow is not None and not slow.wait(0.02):
                self.wfile.write(b" ")

        do_POST = do_PUT = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.handle_error = lambda request, client_address: None  # type: ignore[method-assign]  # clients leave
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=5)


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("command", COMMANDS)
def test_it_is_one_sentence_that_steers_no_terminal(
    world: World, tmp_path: Path, command: str, answer: str
) -> None:
    (tmp_path / "token").write_text("glsa_right")
    with answering(*ANSWERS[answer]) as url:
        words = COMMANDS[command].replace("URL", url).replace("FOLDER", str(tmp_path)).split()
        done = world.run(*words, input="hello\n")
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    assert (done.exit_code, "error: " in done.stderr) == (1, True) or command == "down", done.output
    assert not set(done.output) & set("\x1b\x07\x9b\r")


def test_what_steers_a_terminal_is_written_out_in_tables(capsys: pytest.CaptureFixture[str]) -> None:
    made = tables.table("name", "value", left=("name",))
    made.add_row("a\x1b[31mb", "\x07")
    for width in (80, 6):
        tables.show(Console(width=width), made)
        said = capsys.readouterr().out
        assert r"\x1b" in said and not set(said) & {"\x1b", "\x07"}


def test_an_answer_that_does_not_end_is_given_up() -> None:
    over = threading.Event()
    with answering(200, b"{", slow=over) as url, httpx.Client(trust_env=False) as client:
        with pytest.raises(httpx.ReadTimeout, match=r"had not ended after 0\.3 s"):
            ask(client, "GET", url, timeout_s=0.3)
        with pytest.raises(httpx.RemoteProtocolError, match="longer than 3 bytes"):
            ask(client, "GET", url, timeout_s=5.0, most_bytes=3)
        over.set()


EVENTS: dict[str, Any] = {
    "deep": DEEP.decode(),
    "no object": "[]",
    "choices that are none": '{"choices": 5}',
    "usage that is none": '{"choices": [{"text": "a"}], "usage": [1]}',
    "details that are none": '{"choices": [{"text": "a"}], "usage": {"prompt_tokens_details": [1]}}',
    "half a token": '{"choices": [{"text": "a"}], "usage": {"completion_tokens": 1.5}}',
    "endless tokens": '{"choices": [{"text": "a"}], "usage": {"prompt_tokens": 1e999}}',
}


@pytest.mark.parametrize("event", EVENTS)
def test_odd_events_are_failures_of_their_request(event: str) -> None:
    async def complete(url: str) -> str:
        client = CompletionClient(url, headers={}, timeout_s=5.0, clock=lambda: 0.0)
        async with client:
            return (await client.complete(b"{}")).error

    body = f"data: {EVENTS[event]}\n\ndata: [DONE]\n\n".encode()
    with answering(200, body) as url:
        assert asyncio.run(complete(url)) != ""
