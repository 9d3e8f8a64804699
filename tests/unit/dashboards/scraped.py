"""A Ray dashboard and a Ray agent in one, as far as Prometheus asks them."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Final

_DISCOVERY: Final = "/api/prometheus/sd"


class Scraped:
    """Lists itself as the only agent, to who has the token, and answers scrapes. Use as a context."""

    def __init__(self, exposition: str, *, token: str | None = None) -> None:
        self.has_answered = threading.Event()
        scraped = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                wanted = None if token is None else f"Bearer {token}"
                if self.path == _DISCOVERY and self.headers.get("Authorization") != wanted:
                    self.send_error(403)
                    return
                if self.path == _DISCOVERY:
                    body = json.dumps([{"targets": [scraped.url.removeprefix("http://")], "labels": {}}])
                    kind = "application/json"
                else:
                    body, kind = exposition, "text/plain; version=0.0.4"
                    scraped.has_answered.set()
                self.send_response(200)
                self.send_header("content-type", kind)
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Scraped:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)
