"""A command line whose outside world is fake."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from cluster.bench.load import LoadRun, MakeLoad, Server
from cluster.bench.orders import Order
from cluster.cli.commands import app
from cluster.cli.serve import serve
from cluster.cli.services import Services
from cluster.models.gguf_model import write_folder
from cluster.running.deployed import DeployedFiles
from cluster.running.note import RunningNote
from cluster.running.serve_api import ServeApi
from tests.unit.cluster.fakes import FakeLauncher, FakeServer, embedded_model
from tests.unit.cluster.tiny_gguf import write_tiny_gguf
from workers.directory.groups import GroupEntry, GroupListing


class World:
    """What the commands meet."""

    def __init__(self, server: FakeServer, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.server = server
        self.folder = folder
        self.launcher = FakeLauncher(ServeApi(server.url), folder)
        self.note = RunningNote(folder / "run")
        self.entries: list[GroupEntry] = []
        self.scaling = ""
        self.measured: Mapping[str, Any] = {}  # what measuring programs give
        self.loaded: LoadRun | None = None  # what became of a load

    def run(self, *arguments: str, input: str | bytes | None = None) -> Result:
        """Run `tandem` with these arguments."""
        services = Services(
            launcher=self.launcher,
            handover=self.launcher,
            reserved_port=self.launcher.reserved_port,
            directories=lambda address, applications, session: {"tandem": self.listing()},
            ensure_model=embedded_model(self.folder),
            note=self.note,
            deployed=DeployedFiles(self.folder / "run"),
            locks=self.folder / "locks",
            measure=self._measure,
            run_load=self._run_load,
        )
        return CliRunner().invoke(app, list(arguments), obj=services, input=input)

    def _measure(self, order: Order, report: Callable[[str], None], *, timeout_s: float) -> Mapping[str, Any]:
        report("measuring")
        return self.measured

    def _run_load(self, server: Server, make: MakeLoad, report: Callable[[str], None]) -> LoadRun:
        assert self.loaded is not None
        return self.loaded

    def listing(self) -> GroupListing:
        """What the directory of the application says."""
        return GroupListing(directory_id="d", version=1, entries=tuple(self.entries), scaling=self.scaling)

    def stop_when_noted(self, number: signal.Signals) -> None:
        """Send a signal to this process once a `serve` has written its note and said what it has to say."""
        server: Any = vars(sys.modules[serve.__module__])["_Server"]
        wait = server._wait

        def stop_and_wait(this: object) -> None:
            os.kill(os.getpid(), number)
            wait(this)

        self._monkeypatch.setattr(server, "_wait", stop_and_wait)

    def file(self, **changes: Any) -> str:
        """A deployment file for the fake server."""
        tree = {
            "proxy_location": "HeadOnly",
            "http_options": {"host": "127.0.0.1", "port": self.server.port},
            "applications": [
                {
                    "name": "tandem",
                    "route_prefix": "/",
                    "import_path": "cluster.app:build",
                    "args": {"model": {"path": "embedded"}},
                    "deployments": [{"name": "unified", "num_replicas": 2}],
                }
            ],
            **changes,
        }
        file = self.folder / "deployment.yaml"
        file.write_text(json.dumps(tree))
        return str(file)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A home of its own, a fake server that runs, and the command line."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_DASHBOARD_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    with FakeServer().running() as server:
        yield World(server, tmp_path, monkeypatch)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with 4 heads and 2 KV heads, context 128."""
    root = tmp_path_factory.mktemp("tiny")
    write_tiny_gguf(root / "tiny.gguf")
    folder = root / "tiny-model"
    folder.mkdir()
    write_folder(root / "tiny.gguf", folder, lambda text: None)
    return folder
