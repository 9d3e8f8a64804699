"""`tandem serve`: everything in the foreground on this machine, and nothing left when it ends."""

from __future__ import annotations

import os
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from cluster.cli.first_question import (
    QUESTION,
    FirstAnswer,
    ask_first_question,
    curl_example,
    python_example,
)
from cluster.cli.keys import key_headers
from cluster.cli.options import DashboardOption, OpenOption, PortOption, ReadyOption, SetOption, json_lines
from cluster.cli.rollout import check_unchanged
from cluster.cli.services import Services, services_of
from cluster.cli.signals import interrupts
from cluster.cli.terminal import CommandFailed, Phases, Terminal
from cluster.config.tree import EMBEDDED_MODEL
from cluster.deployment.load import DEFAULT_FILE, Deployment, check_model, load_deployment
from cluster.launch.errors import LaunchError
from cluster.launch.local_cluster import LocalCluster
from cluster.running.deployed import DeployedFile
from cluster.running.note import RunningCluster
from cluster.running.process import process_start
from cluster.running.serve_api import ServeApi, ServeApiError

_LOOK_S = 5.0  # between two looks at what Serve runs, and for one
_END_S = 5.0  # after the drain: for the error that ends what still runs, and for ranks to end in order

FileArgument = Annotated[
    Path | None,
    typer.Argument(metavar="[FILE]", help="Deployment file; the default serves the embedded model."),
]


def serve(
    context: typer.Context,
    file: FileArgument = None,
    port: PortOption = None,
    assignments: SetOption = None,
    dashboard: DashboardOption = None,
    timeout_s: ReadyOption = 900.0,
    allow_open: OpenOption = False,
    as_json: Annotated[bool, json_lines("each of: it is ready, it has stopped")] = False,
) -> None:
    """Serve a deployment in the foreground. Starts a local Ray cluster; Ctrl-C stops all it started."""
    terminal = Terminal(as_json=as_json, has_lines=True)
    services = services_of(context)
    with terminal.exit_codes():
        deployment = load_deployment(
            file or DEFAULT_FILE, port=port, assignments=assignments or (), allow_open=allow_open
        )
        given = DeployedFile(file=str(file or DEFAULT_FILE), assignments=tuple(assignments or ()), port=port)
        server = _Server(terminal, services, deployment, given, timeout_s)
        if dashboard is not None:  # a cluster that exists may hold the port for us already
            server.run(dashboard)
        else:
            with services.reserved_port(deployment.host, deployment.port):
                server.run(None)


class _Server:
    """One run of `tandem serve`: what it has started so far, and how to undo it."""

    def __init__(
        self,
        terminal: Terminal,
        services: Services,
        deployment: Deployment,
        given: DeployedFile,
        timeout_s: float,
    ) -> None:
        self._terminal = terminal
        self._services = services
        self._deployment = deployment
        self._given = given
        self._timeout_s = timeout_s
        pools = deployment.config.pools.by_name().values()
        self._drain_s = max(pool.drain_timeout_s for pool in pools)  # for requests in flight when stopped
        self._cluster: LocalCluster | None = None  # set when we started it
        self._api: ServeApi | None = None  # set when there may be something on it to take back
        self._is_noted = False  # other commands find it by its note
        self._was_interrupted = False

    def run(self, dashboard: str | None) -> None:
        """Start, wait for the end, stop. Returns after a stopping signal; raises when something fails."""
        with interrupts():
            try:
                try:
                    self._start(dashboard)
                    self._wait()
                except KeyboardInterrupt:
                    self._was_interrupted = True  # a normal end
            finally:
                self._stop()

    def _start(self, dashboard: str | None) -> None:
        deployment, handover = self._deployment, self._services.handover
        headers = key_headers(deployment.config.router.http.api_keys_file)
        with Phases(self._terminal) as phases:
            if deployment.config.model.path == EMBEDDED_MODEL:
                self._services.ensure_model(phases.start)
            check_model(deployment)
            if dashboard is not None:
                api = self._services.open_api(dashboard)
                _refuse_to_replace(api, deployment)
                check_unchanged(api.details(), deployment)
            else:
                num_cpus = max(os.cpu_count() or 1, deployment.num_cpus())
                self._cluster = self._services.launcher.start_local_cluster(
                    num_cpus=num_cpus, report=phases.start, timeout_s=self._timeout_s - phases.elapsed_s
                )
                api = self._cluster.api
            self._api = api
            left_s = self._timeout_s - phases.elapsed_s
            handover.deploy(api, deployment.tree, report=phases.start, timeout_s=left_s)
            handover.wait_ready(
                api,
                application=deployment.application,
                url=deployment.url,
                headers=headers,
                report=phases.start,
                timeout_s=self._timeout_s - phases.elapsed_s,
                is_alive=self._is_cluster_alive,
            )
            ready_s = phases.elapsed_s
            phases.start("asking it a first question")
            first = ask_first_question(deployment.url, headers)
        self._remember(api)
        self._announce(api, first, ready_s)

    def _is_cluster_alive(self) -> bool:
        return self._cluster is None or self._cluster.head.poll() is None

    def _wait(self) -> None:
        """Until the cluster ends by itself, which is an error, or another command has emptied it."""
        had_application, looked_s = False, time.monotonic()
        while self._is_cluster_alive():
            time.sleep(0.25)
            if time.monotonic() - looked_s < _LOOK_S:
                continue
            has_application = self._has_application()
            if had_application and has_application is False:
                self._terminal.say("the application was taken away by another command: nothing is served")
                return
            had_application, looked_s = had_application or bool(has_application), time.monotonic()
        raise LaunchError("the Ray cluster ended by itself; start again")

    def _has_application(self) -> bool | None:
        """Whether Serve runs any; None when it does not say."""
        assert self._api is not None
        try:
            return bool(replace(self._api, timeout_s=_LOOK_S).details().get("applications"))
        except ServeApiError:
            return None

    def _stop(self) -> None:
        """Take back what was started, in reverse order. A second Ctrl-C stops at once."""
        if self._cluster is None and self._api is None:
            if self._was_interrupted:
                self._say_stopped()
            return
        self._services.note.mark_stopping(os.getpid())
        try:
            with Phases(self._terminal) as phases:
                phases.start(
                    f"stopping; requests in flight have {self._drain_s:g} s, Ctrl-C again stops at once"
                )
                killed = self._take_back()
                if killed:
                    phases.start(f"these did not end by themselves and were killed: {'; '.join(killed)}")
        finally:
            self._take_back()  # when the terminal went away before it was done
            self._services.note.remove(os.getpid())
        self._say_stopped()

    def _say_stopped(self) -> None:
        if self._terminal.as_json:
            self._terminal.emit(event="stopped")
        self._terminal.say("stopped")

    def _take_back(self) -> list[str]:
        """Stop the cluster, or empty one that we found; nothing at a second call. Gives what was killed."""
        killed: list[str] = []
        grace_s = self._drain_s + _END_S
        while self._cluster is not None or self._api is not None:
            try:
                if self._cluster is not None:
                    killed = self._services.launcher.stop_all(self._cluster, grace_s=grace_s)
                elif self._api is not None:
                    self._api.remove_applications()
            except KeyboardInterrupt:
                if grace_s > 0.0 or self._cluster is not None:
                    grace_s = 0.0
                    continue
            self._cluster = self._api = None
        return killed

    def _remember(self, api: ServeApi) -> None:
        try:
            given = self._given
            self._services.deployed.write(api.url, given.file, given.assignments, given.port)
            self._services.note.write(
                RunningCluster(
                    pid=os.getpid(),
                    dashboard_url=api.url,
                    gcs_address=self._cluster.gcs_address if self._cluster is not None else "",
                    api_url=self._deployment.url,
                    application=self._deployment.application,
                    file=self._deployment.file,
                    api_keys_file=self._deployment.config.router.http.api_keys_file or "",
                    process_start=process_start(os.getpid()) or 0,
                )
            )
            self._is_noted = True
        except OSError as error:
            self._terminal.say(f"note: other tandem commands need --url and --dashboard now: {error}")

    def _announce(self, api: ServeApi, first: FirstAnswer, ready_s: float) -> None:
        url = self._deployment.url
        if self._terminal.as_json:
            self._terminal.emit(
                event="ready",
                ready_s=round(ready_s, 2),
                url=url,
                api=f"{url}/v1",
                dashboard=api.url,
                model=first.model,
                first_answer=first.text,
            )
            return
        say = self._terminal.say
        say(f"ready in {ready_s:.1f} s", style="bold green")
        say(f"\n  {QUESTION}\n  {first.model}: {first.text}\n", style="dim")
        say(f"API        {url}/v1\ndashboard  {api.url}\n", style="bold")
        keys_file = self._deployment.config.router.http.api_keys_file
        if keys_file is not None:
            say(f"every call needs a key of {keys_file}: the header 'Authorization: Bearer KEY'\n")
        with_key = keys_file is not None
        for example in (curl_example, python_example):
            say(example(url, first.model, with_key=with_key, is_chat=first.is_chat) + "\n")
        command = command_as_typed(sys.argv[0], Path.cwd())
        is_found = self._is_noted and len(self._services.note.all()) == 1  # without being named
        chat = "chat" if is_found else f"chat --url {url}"
        status = "status" if is_found else f"status --dashboard {api.url}"
        talk = f"Talk to it: {command} {chat}" if first.is_chat else "No chat template: /v1/completions only"
        say(f"{talk}     What runs: {command} {status}     End: Ctrl-C")


def command_as_typed(program: str, folder: Path) -> str:
    """How the command that runs as `program` can be typed again in a folder."""
    path = Path(program).absolute()
    found = shutil.which(path.name)
    if path.name != "tandem" or (found is not None and Path(found).samefile(path)):
        return "tandem"
    return str(path.relative_to(folder) if path.is_relative_to(folder) else path)


def _refuse_to_replace(api: ServeApi, deployment: Deployment) -> None:
    """A deployment replaces everything Serve runs, so a foreground run only goes onto an empty cluster."""
    others = sorted(api.details().get("applications", {}))
    if others:
        raise CommandFailed(
            f"the cluster at {api.url} already runs {', '.join(others)}; change it with "
            f"`tandem deploy {deployment.file}`, or stop it with `tandem down`"
        )
