"""What the commands do their work with. Given to them as one object, so that tests bring their own."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import typer

from cluster.bench.child import measure
from cluster.bench.load import LoadRun, MakeLoad, Server, run_load
from cluster.bench.orders import Order
from cluster.launch import handover, local_cluster
from cluster.launch.local_cluster import LocalCluster
from cluster.launch.news import Report
from cluster.launch.ports import reserved_port
from cluster.models import embedded
from cluster.running.deployed import DeployedFiles
from cluster.running.directory_probe import read_directories
from cluster.running.note import RunningCluster, RunningNote, default_folder
from cluster.running.serve_api import ServeApi, read_token
from workers.directory.groups import GroupListing

DEFAULT_DASHBOARD = "http://127.0.0.1:8265"
DEFAULT_URL = "http://127.0.0.1:8000"


class Launcher(Protocol):
    """Starting and stopping: the module `cluster.launch.local_cluster`, or a fake of the tests."""

    def start_local_cluster(self, *, num_cpus: int, report: Report, timeout_s: float) -> LocalCluster: ...

    def stop_all(self, cluster: LocalCluster, *, grace_s: float) -> list[str]: ...


class Handover(Protocol):
    """What comes between: the module `cluster.launch.handover`, or a fake of the tests."""

    def deploy(
        self, api: ServeApi, config: Mapping[str, Any], *, report: Report, timeout_s: float
    ) -> None: ...

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
    ) -> None: ...


class Measure(Protocol):
    """`cluster.bench.child.measure`."""

    def __call__(
        self, order: Order, report: Callable[[str], None], *, timeout_s: float
    ) -> Mapping[str, Any]: ...


# From a server, the load for its model, and who hears of progress, to what became of the requests.
RunLoad = Callable[[Server, MakeLoad, Callable[[str], None]], LoadRun]


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """The outside world of the commands."""

    launcher: Launcher = local_cluster
    handover: Handover = handover
    reserved_port: Callable[[str, int], AbstractContextManager[None]] = reserved_port
    # (Ray's address or "", applications, run of Ray) -> what the groups of each say of themselves
    directories: Callable[[str, list[str], str], Mapping[str, GroupListing]] = read_directories
    ensure_model: Callable[[embedded.Progress], Path] = embedded.ensure
    measure: Measure = measure
    run_load: RunLoad = run_load
    deployed: DeployedFiles = field(default_factory=lambda: DeployedFiles(default_folder()))
    note: RunningNote = field(default_factory=lambda: RunningNote(default_folder()))
    locks: Path = field(default_factory=default_folder)

    def open_api(self, dashboard: str | None) -> ServeApi:
        """Serve's API of the cluster asked for: the option, Ray's own variable, a running `tandem serve`,
        or the default address. Raises ServeApiError when nothing answers there."""
        running = self.note.read()
        url = dashboard or os.environ.get("RAY_DASHBOARD_ADDRESS")
        url = url or (running.dashboard_url if running is not None else DEFAULT_DASHBOARD)
        api = ServeApi(url.rstrip("/"), read_token())
        api.details()
        return api

    def running(self, api: ServeApi) -> RunningCluster | None:
        """The `tandem serve` that runs this cluster, if one does."""
        return self.note.at(api.url)


def services_of(context: typer.Context) -> Services:
    """The services a command was started with."""
    found = context.find_object(Services)
    assert found is not None, "the command line was started without services"
    return found
