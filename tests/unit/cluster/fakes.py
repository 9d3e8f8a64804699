"""A Ray dashboard, a Tandem API and a launcher that exist only in this process."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from cluster.launch.errors import LaunchError
from cluster.launch.guardian import Guardian
from cluster.launch.local_cluster import LocalCluster
from cluster.launch.news import Report
from cluster.models.embedded import Progress
from cluster.running.serve_api import ServeApi

LOAD: dict[str, Any] = {
    "groups": [
        {
            "group": "unified-u1",
            "role": "unified",
            "ready": True,
            "running": 3,
            "waiting": 2,
            "free_blocks": 50,
            "cached_blocks": 25,
            "active_blocks": 25,
            "exchanges_kv": True,
            "exchange_problem": "",
            "leases": 0,
            "transferring_blocks": 0,
            "reads": [],
        }
    ]
}


class FakeServer:
    """Serve's HTTP API and the router's, at one address. What it answers can be changed at any time."""

    def __init__(self) -> None:
        self.details: dict[str, Any] = {"applications": {}}
        self.answers_dashboard = True
        self.session = "session_fake"  # of the dashboard
        self.load = LOAD
        self.other_loads: dict[str, Any] = {}  # of other applications, by path
        self.explained: dict[str, Any] = {}  # by id, what /explain says
        self.num_forgetful = 0  # requests to /explain that meet a router that knows nothing
        self.prefix = ""  # of the API's paths
        self.key: str | None = None  # that the API wants
        self.puts: list[Any] = []  # bodies of deployments
        self.takes_puts = threading.Event()  # without it they wait, and their clients may leave
        self.takes_puts.set()
        self.chats: list[Any] = []  # bodies of chat requests
        self.pieces: list[str] = ["Paris", ".", " Yes"]
        self.chat_status = 200
        self.has_template = True
        self.stream_end = "data: [DONE]\n\n"
        self.pause = threading.Event()  # a stream waits for it after its first piece
        self.pause.set()
        self.client_left = threading.Event()  # set when a paused stream finds its client gone
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.port = self._http.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True)

    @contextmanager
    def running(self) -> Iterator[FakeServer]:
        self._thread.start()
        try:
            yield self
        finally:
            self.pause.set()
            self.takes_puts.set()
            self._http.shutdown()
            self._http.server_close()
            self._thread.join(timeout=5)

    def stream(self) -> Iterator[str]:
        """A chat answer as server-sent events."""
        yield ": keep-alive\n\n"
        yield _chunk({"role": "assistant", "content": ""})
        for number, piece in enumerate(self.pieces):
            yield _chunk({"content": piece})
            if number == 0 and not self.pause.is_set():
                while not self.pause.wait(0.02):
                    yield ": keep-alive\n\n"
        yield _chunk({}, finish_reason="stop")
        usage = {
            "prompt_tokens": 20,
            "completion_tokens": len(self.pieces),
            "prompt_tokens_details": {"cached_tokens": 16},
        }
        yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n"
        yield self.stream_end

    def _handler(server) -> type[BaseHTTPRequestHandler]:  # the handler's self is another
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path == "/api/serve/applications/" and server.answers_dashboard:
                    self._answer(server.details)
                elif self.path == "/api/version" and server.answers_dashboard:
                    self._answer({"session_name": server.session})
                elif not self._has_key():
                    self._answer({"error": {"message": "a key is needed"}}, status=401)
                elif self.path == f"{server.prefix}/v1/models":
                    self._answer({"data": [{"id": "Fake"}]})
                elif self.path in server.other_loads:
                    self._answer(server.other_loads[self.path])
                elif self.path == f"{server.prefix}/load":
                    self._answer(server.load)
                elif self.path == f"{server.prefix}/ready":
                    self._answer({})
                elif self.path.startswith(f"{server.prefix}/explain/"):
                    self._explain(self.path.rpartition("/")[2])
                else:
                    self._answer({}, status=404)

            def _explain(self, request_id: str) -> None:
                server.num_forgetful -= 1
                if request_id in server.explained and server.num_forgetful < 0:
                    self._answer(server.explained[request_id])
                else:
                    self._answer({"error": {"message": f"no such request: {request_id}"}}, status=404)

            def _has_key(self) -> bool:
                return server.key is None or self.headers["authorization"] == f"Bearer {server.key}"

            def do_PUT(self) -> None:
                body = self._body()
                server.puts.append(body)
                if not server.takes_puts.is_set():
                    server.takes_puts.wait(20)
                    self.close_connection = True
                    return
                server.details = {
                    "applications": {app["name"]: {"status": "RUNNING"} for app in body["applications"]},
                    **{key: body[key] for key in ("http_options", "proxy_location") if key in body},
                }
                self._answer({})

            def do_POST(self) -> None:
                body = self._body()
                server.chats.append(body)
                if not self._has_key() or not self.path.startswith(f"{server.prefix}/v1/"):
                    self._answer({"error": {"message": "not so"}}, status=401)
                elif server.chat_status != 200:
                    error = {"message": "the server has no room", "code": "server_is_overloaded"}
                    self._answer({"error": error}, status=server.chat_status)
                elif not server.has_template and "messages" in body:
                    error = {"message": "no template", "code": "unsupported_parameter", "param": "messages"}
                    self._answer({"error": error}, status=400)
                elif "prompt" in body:
                    self._answer({"choices": [{"text": " Lyon. "}]})
                elif not body.get("stream"):
                    self._answer({"choices": [{"message": {"content": " Paris. "}}]})
                else:
                    self.send_response(200)
                    self.send_header("content-type", "text/event-stream")
                    self.end_headers()
                    try:
                        for event in server.stream():
                            self.wfile.write(event.encode())
                            self.wfile.flush()
                    except (BrokenPipeError, ConnectionResetError):
                        server.client_left.set()

            def _body(self) -> Any:
                return json.loads(self.rfile.read(int(self.headers["content-length"])))

            def _answer(self, value: Any, status: int = 200) -> None:
                body = value if isinstance(value, bytes) else json.dumps(value).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(body)))
                self.send_header("retry-after", "3")
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Nothing: the output under test is the command's."""

        return Handler


class FakeLauncher:
    """Notes what it was asked for, in order; `api` is the cluster it pretends to start."""

    def __init__(self, api: ServeApi, folder: Path) -> None:
        self.calls: list[str] = []
        self.headers: list[Mapping[str, str]] = []  # of wait_ready
        self.configs: list[dict[str, Any]] = []
        self.timeouts_s: list[float] = []  # of deploy
        self.taken_port: int | None = None
        self.failure: LaunchError | str | None = None  # what wait_ready raises
        self.on_ready: Callable[[], None] = lambda: None
        self.on_stop: Callable[[], None] = lambda: None
        self.head: subprocess.Popen[bytes] | None = None
        self._api = api
        self._folder = folder

    @contextmanager
    def reserved_port(self, host: str, port: int) -> Iterator[None]:
        self.calls.append(f"reserve {host} {port}")
        if port == self.taken_port:
            raise LaunchError(f"port {port} on {host} cannot be used")
        yield

    def start_local_cluster(self, *, num_cpus: int | None, report: Report, timeout_s: float) -> LocalCluster:
        self.calls.append("start")
        report("starting a local Ray cluster")
        self.head = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        return LocalCluster(
            head=self.head,
            api=self._api,
            gcs_address="127.0.0.1:1",
            folder=self._folder,
            mark="m",
            guardian=Guardian(self.head),
        )

    def deploy(self, api: ServeApi, config: Mapping[str, Any], *, report: Report, timeout_s: float) -> None:
        self.calls.append("deploy")
        self.configs.append(dict(config))
        self.timeouts_s.append(timeout_s)
        report("handing the deployment to Serve")

    def wait_ready(
        self,
        api: ServeApi,
        *,
        application: str,
        url: str,
        headers: Mapping[str, str],
        report: Report,
        timeout_s: float,
        is_alive: Callable[[], bool] | None = None,
    ) -> None:
        self.calls.append(f"wait_ready {application} {url}")
        self.headers.append(headers)
        if self.failure is not None:
            raise LaunchError(self.failure) if isinstance(self.failure, str) else self.failure
        report(f"serving at {url}")
        self.on_ready()

    def stop_all(self, cluster: LocalCluster, *, grace_s: float) -> list[str]:
        self.calls.append(f"stop {grace_s:g}")
        self.on_stop()
        cluster.head.kill()
        cluster.head.wait(timeout=10)
        return []


def embedded_model(folder: Path) -> Callable[[Progress], Path]:
    """Stands for `cluster.models.embedded.ensure`."""

    def ensure(progress: Progress) -> Path:
        progress("found SmolLM2-135M-Instruct")
        return folder

    return ensure


def _chunk(delta: dict[str, str], finish_reason: str | None = None) -> str:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    return f"data: {json.dumps({'choices': [choice], 'usage': None}, ensure_ascii=False)}\n\n"
