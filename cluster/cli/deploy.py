"""`tandem deploy`, `tandem validate` and `tandem down`: a deployment file against a running cluster."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from cluster.cli.options import (
    DashboardOption,
    JsonOption,
    OpenOption,
    PortOption,
    SetOption,
    StepReadyOption,
    finite,
)
from cluster.cli.rollout import Rollout
from cluster.cli.services import Services, services_of
from cluster.cli.terminal import CommandFailed, Phases, Terminal, waiting
from cluster.deployment.cluster_files import FileKind, check_cluster_file
from cluster.deployment.load import CommandLine, check_all, load_deployment, read_deployment
from cluster.figures.words import counted
from cluster.running.deployed import DeployedFile
from cluster.running.note import RunningCluster
from cluster.running.process import process_start
from cluster.running.serve_api import ServeApi

FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="Deployment file.")]


def deploy(
    context: typer.Context,
    file: FileArgument,
    assignments: SetOption = None,
    dashboard: DashboardOption = None,
    wait: Annotated[bool, typer.Option(help="Wait until every group has answered.")] = True,
    timeout_s: StepReadyOption = 900.0,
    allow_open: OpenOption = False,
    as_json: JsonOption = False,
) -> None:
    """Check a deployment file, then make a running cluster look like it."""
    terminal = Terminal(as_json=as_json)
    with terminal.exit_codes():
        deployment = load_deployment(file, assignments=assignments or (), allow_open=allow_open)
        done = Rollout(
            deployment=deployment,
            given=DeployedFile(file=str(file), assignments=tuple(assignments or ())),
            dashboard=dashboard,
            wait=wait,
            timeout_s=timeout_s,
        ).run(terminal, services_of(context))
        if as_json:
            terminal.emit(**asdict(done))


def validate(
    file: FileArgument,
    port: PortOption = None,
    assignments: SetOption = None,
    allow_open: OpenOption = False,
    as_json: JsonOption = False,
) -> None:
    """Check a deployment file and its model folder, or a file for `ray up` or KubeRay; start nothing.

    Exit code 2 when it has mistakes.
    """
    terminal = Terminal(as_json=as_json)
    with terminal.exit_codes():
        with waiting(terminal, "checking the file"):
            source = read_deployment(file)
            kind = check_cluster_file(source, str(file))
        if kind is not FileKind.DEPLOYMENT:
            terminal.say(f"{file}: a valid {kind.value}", style="bold green")
            if as_json:
                terminal.emit(valid=True, file=str(file), kind=kind.value)
            return
        given = CommandLine(port=port, assignments=tuple(assignments or ()))
        with waiting(terminal, "checking the file and its model"):
            deployment, checkpoint = check_all(source, str(file), given, allow_open=allow_open)
        pools = {
            name: {
                "groups": deployment.num_replicas.get(name, 1),
                "tensor_parallel": pool.tensor_parallel,
            }
            for name, pool in deployment.config.pools.by_name().items()
        }
        if as_json:
            terminal.emit(
                valid=True,
                file=str(file),
                kind=kind.value,
                application=deployment.application,
                url=deployment.url,
                pools=pools,
            )
            return
        terminal.say(f"{file}: valid", style="bold green")
        terminal.say(f"  application  {deployment.application} at {deployment.url}")
        if checkpoint is None:
            terminal.say("  model        embedded, converted at the first start (or by `tandem model fetch`)")
        else:
            size = f"{checkpoint.weight_bytes / 1e6:.0f} MB"
            terminal.say(f"  model        {checkpoint.folder} ({size}, context {checkpoint.max_model_len})")
        for name, pool in pools.items():
            groups, ranks = counted(pool["groups"], "group"), counted(pool["tensor_parallel"], "rank")
            terminal.say(f"  pool         {name}: {groups} of {ranks}")


def down(
    context: typer.Context,
    dashboard: DashboardOption = None,
    timeout_s: Annotated[
        float, typer.Option("--timeout-s", callback=finite, min=0, help="Longest time until all is stopped.")
    ] = 60.0,
    as_json: JsonOption = False,
) -> None:
    """Stop what is deployed; a `tandem serve` that runs the cluster ends too, as by Ctrl-C."""
    terminal = Terminal(as_json=as_json)
    services = services_of(context)
    with terminal.exit_codes():
        with Phases(terminal) as phases:
            api = _stop(services, dashboard, _Limit(timeout_s), phases)
        if as_json:
            terminal.emit(event="stopped", dashboard=api.url)
        terminal.say("stopped")


def _stop(services: Services, dashboard: str | None, limit: _Limit, phases: Phases) -> ServeApi:
    """Returns when nothing runs any more. Raises ServeApiError and CommandFailed."""
    phases.start("looking for the cluster")
    api = services.open_api(dashboard)
    running = services.running(api)
    if running is not None:
        phases.start(f"ending tandem serve (process {running.pid})")
        with suppress(ProcessLookupError):
            os.kill(running.pid, signal.SIGTERM)
        while not _has_ended(api, running):
            limit.wait(f"tandem serve (process {running.pid}) has not ended")
    else:
        names = sorted(api.details().get("applications", {}))
        phases.start(f"stopping {', '.join(names) or 'nothing: no application is deployed'}")
        if names:  # asking for none would start Serve, with its own ideas of ports, where it does not run
            api.remove_applications()
        while api.details().get("applications"):
            limit.wait(f"Serve still stops {', '.join(names)}")
    return api


def _has_ended(api: ServeApi, running: RunningCluster) -> bool:
    """Whether a `tandem serve` has taken back what it started: the cluster, or what it put on another's."""
    if process_start(running.pid) == running.process_start:
        return False
    return not (api.is_reachable() if running.gcs_address else api.details().get("applications"))


class _Limit:
    """A wait that ends."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s

    def wait(self, complaint: str) -> None:
        """A little; raises CommandFailed when the time is over."""
        if time.monotonic() > self._deadline:
            raise CommandFailed(
                f"{complaint} after {self._timeout_s:g} s (--timeout-s); it goes on, see `tandem status`"
            )
        time.sleep(0.2)
