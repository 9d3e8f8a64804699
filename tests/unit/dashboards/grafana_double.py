"""A Grafana as far as pushing asks it: it keeps what it is given and refuses what Grafana refuses.

Shapes are those of Grafana's HTTP API documentation. `with_resources`: as from Grafana 12 on.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Final

TOKEN: Final = "glsa_right"
READ_ONLY: Final = "glsa_viewer"
_RESOURCES: Final = "/apis/dashboard.grafana.app"
_PAGES: Final = f"{_RESOURCES}/v1/namespaces/default/dashboards"
_Answer = tuple[int, Mapping[str, Any]]


def _message(status: int, text: str) -> _Answer:
    return status, {"message": text}


class GrafanaDouble:
    """Use as a context. `writes`: what has changed, in order, as (method, path)."""

    def __init__(self, *, with_resources: bool = False) -> None:
        self.with_resources = with_resources
        self.folders: dict[str, dict[str, Any]] = {}
        self.sources: dict[str, dict[str, Any]] = {}
        self.pages: dict[str, dict[str, Any]] = {}  # uid -> {spec, folder, version}
        self.writes: list[tuple[str, str]] = []
        self.edit_before_write: str | None = None  # uid of a page that somebody saves meanwhile
        self.database = "ok"
        double = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._reply(double._get(self.path, self.headers.get("Authorization", "")))

            def do_POST(self) -> None:
                self._write("POST")

            def do_PUT(self) -> None:
                self._write("PUT")

            def log_message(self, format: str, *args: object) -> None:
                pass

            def _write(self, method: str) -> None:
                raw = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Type") != "application/json":
                    self._reply(_message(400, "bad request data"))
                    return
                body = json.loads(raw)
                answer = double._write(method, self.path, body, self.headers.get("Authorization", ""))
                if answer[0] < 300:
                    double.writes.append((method, self.path))
                self._reply(answer)

            def _reply(self, answer: _Answer) -> None:
                text = json.dumps(answer[1]).encode()
                self.send_response(answer[0])
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> GrafanaDouble:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)

    def _get(self, path: str, authorization: str) -> _Answer:
        if path == "/api/health":
            return 200, {"database": self.database, "version": "12.3.0", "commit": "double"}
        if authorization not in (f"Bearer {TOKEN}", f"Bearer {READ_ONLY}"):
            return _message(401, "Invalid API key")
        folder, _, uid = path.rpartition("/")
        if path == _RESOURCES:
            versions = [
                {"groupVersion": f"dashboard.grafana.app/{name}", "version": name} for name in ("v1", "v2")
            ]
            found = {"kind": "APIGroup", "name": "dashboard.grafana.app", "versions": versions}
            return (200, found) if self.with_resources else _message(404, "Not found")
        if folder == "/api/folders":
            return (200, self.folders[uid]) if uid in self.folders else _message(404, "folder not found")
        if folder == "/api/datasources/uid":
            return (200, self.sources[uid]) if uid in self.sources else _message(404, "Data source not found")
        if uid not in self.pages:
            return _message(404, "Dashboard not found")
        page = self.pages[uid]
        if folder == "/api/dashboards/uid":
            spec = {**page["spec"], "uid": uid, "id": 7, "version": page["version"]}
            return 200, {"meta": {"folderUid": page["folder"], "slug": uid}, "dashboard": spec}
        assert folder == _PAGES, path
        return 200, self._resource(uid)

    def _resource(self, uid: str) -> dict[str, Any]:
        page = self.pages[uid]
        metadata = {
            "name": uid,
            "resourceVersion": str(page["version"]),
            "annotations": {"grafana.app/folder": page["folder"]},
        }
        return {"kind": "Dashboard", "metadata": metadata, "spec": page["spec"]}

    def _write(self, method: str, path: str, body: dict[str, Any], authorization: str) -> _Answer:
        if authorization == f"Bearer {READ_ONLY}":
            return _message(403, "You'll need additional permissions to perform this action.")
        if authorization != f"Bearer {TOKEN}":
            return _message(401, "Invalid API key")
        if self.edit_before_write in self.pages and "dashboards" in path:
            self.pages[str(self.edit_before_write)]["version"] += 1
        if (method, path) == ("POST", "/api/folders"):
            return self._make_folder(body)
        if path.startswith("/api/datasources"):
            return self._put_source(method, path, body)
        if (method, path) == ("POST", "/api/dashboards/db"):
            return self._save_classic(body)
        assert self.with_resources and path.startswith(_PAGES), (method, path)
        return self._save_resource(method, path, body)

    def _make_folder(self, body: dict[str, Any]) -> _Answer:
        if not body.get("title"):
            return _message(400, "folder title cannot be empty")
        if body["uid"] in self.folders:
            return _message(412, "the folder has been changed by someone else")
        self.folders[body["uid"]] = {"id": len(self.folders) + 1, **body}
        return 200, self.folders[body["uid"]]

    def _put_source(self, method: str, path: str, body: dict[str, Any]) -> _Answer:
        if not all(body.get(key) for key in ("name", "type", "access")):
            return _message(400, "bad request data")
        uid = body["uid"]
        if method == "POST":
            if any(source["name"] == body["name"] for source in self.sources.values()):
                return _message(409, "data source with the same name already exists")
        elif path != f"/api/datasources/uid/{uid}" or uid not in self.sources:
            return _message(404, "Data source not found")
        self.sources[uid] = {"id": 3, "orgId": 1, "typeLogoUrl": "", "readOnly": False, **body}
        return 200, {"datasource": self.sources[uid], "id": 3, "message": "saved", "name": body["name"]}

    def _save_classic(self, body: dict[str, Any]) -> _Answer:
        spec, folder = body["dashboard"], body["folderUid"]
        uid = spec["uid"]
        if not spec.get("title"):
            return _message(400, "Dashboard title cannot be empty")
        if len(uid) > 40:
            return _message(400, "uid too long, max 40 characters")
        if folder not in self.folders:
            return _message(400, "folder not found")
        known = self.pages.get(uid)
        if known is not None and spec.get("version") != known["version"] and not body["overwrite"]:
            return 412, {
                "status": "version-mismatch",
                "message": "The dashboard has been changed by someone else",
            }
        version = 1 if known is None else known["version"] + 1
        kept = {key: value for key, value in spec.items() if key not in ("uid", "version")}
        self.pages[uid] = {"spec": kept, "folder": folder, "version": version}
        answer = {
            "id": 7,
            "uid": uid,
            "url": f"/d/{uid}/x",
            "status": "success",
            "version": version,
            "slug": "x",
        }
        return 200, answer

    def _save_resource(self, method: str, path: str, body: dict[str, Any]) -> _Answer:
        metadata, spec = body["metadata"], body["spec"]
        uid, folder = metadata["name"], metadata["annotations"]["grafana.app/folder"]
        if not spec.get("title") or "uid" in spec:
            return _message(400, "invalid spec")
        if folder not in self.folders:
            return _message(400, "folder not found")
        known = self.pages.get(uid)
        if method == "POST":
            if path != _PAGES or known is not None:
                return _message(409, f'dashboards.dashboard.grafana.app "{uid}" already exists')
        elif path != f"{_PAGES}/{uid}" or known is None:
            return _message(404, "not found")
        elif metadata.get("resourceVersion") not in (None, str(known["version"])):
            return _message(
                409, "the object has been modified; please apply your changes to the latest version"
            )
        version = 1 if known is None else known["version"] + 1
        self.pages[uid] = {"spec": spec, "folder": folder, "version": version}
        return (201 if method == "POST" else 200), self._resource(uid)
