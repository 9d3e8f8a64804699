"""`tandem deploy`, `tandem validate` and `tandem down`: a deployment file against a running cluster."""

from __future__ import annotations

import fcntl
import getpass
import hashlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from cluster.cli.keys import key_headers
from cluster.cli.options import DashboardOption, JsonOption, OpenOption, PortOption, SetOption
from cluster.cli.services import Services, services_of
from cluster.cli.terminal import EXIT_INTERRUPTED, CommandFailed, Phases, Terminal
from cluster.config.problems import ConfigError, Problem
from cluster.config.tree import EMBEDDED_MODEL
from cluster.deployment.cluster_files import FileKind, check_cluster_file
from cluster.deployment.load import Deployment, check_model, load_deployment
from cluster.running.deployed import DeployedFile
from cluster.running.note import RunningCluster
from cluster.running.process import process_start
from cluster.running.serve_api import ServeApi, ServeApiError

_DOWN_TIMEOUT_S = 60.0

FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="Deployment file.")]


def deploy(
    context: typer.Context,
    file: FileArgument,
    assignments: SetOption = None,
    dashboard: DashboardOption = None,
    wait: Annotated[bool, typer.Option(help="Wait until every group has answered.")] = True,
    timeout_s: Annotated[float, typer.Option("--timeout-s", help="Longest time until ready.")] = 900.0,
    allow_open: OpenOption = False,
    as_json: JsonOption = False,
) -> None:
    """Check a deployment file, then make a running cluster look like it."""
    terminal = Terminal(as_json=as_json)
    services = services_of(context)
    with terminal.exit_codes():
        deployment = load_deployment(file, assignments=assignments or (), allow_open=allow_open)
        given = DeployedFile(file=str(file), assignments=tuple(assignments or ()))
        roll_out(terminal, services, deployment, given, dashboard, wait=wait, timeout_s=timeout_s)


def find_cluster(services: Services, dashboard: str | None) -> ServeApi:
    """Serve's API of the cluster asked for. Raises CommandFailed, saying how to get one."""
    try:
        return services.open_api(dashboard)
    except ServeApiError as error:
        raise CommandFailed(
            f"{error}; start one with `tandem serve` or `ray start --head`, "
            "or name its dashboard with --dashboard URL"
        ) from error


def roll_out(
    terminal: Terminal,
    services: Services,
    deployment: Deployment,
    given: DeployedFile,
    dashboard: str | None,
    *,
    wait: bool,
    timeout_s: float,
    accepted: Callable[[], None] = lambda: None,
) -> None:
    """Make a cluster look like a deployment, and say so. `given`: what it was made of, to be remembered;
    `accepted` is called when Serve has taken it. Raises what the commands turn into exit codes."""
    headers = key_headers(deployment.config.router.http.api_keys_file) if wait else {}
    is_accepted = False
    try:
        with Phases(terminal) as phases:
            phases.start("looking for the cluster")
            api = find_cluster(services, dashboard)
            with _deploy_lock(services.locks, api.url):
                if deployment.config.model.path == EMBEDDED_MODEL:
                    services.ensure_model(phases.start)
                check_model(deployment)
                check_unchanged(api.details(), deployment)
                left_s = timeout_s - phases.elapsed_s
                services.handover.deploy(api, deployment.tree, report=phases.start, timeout_s=left_s)
                is_accepted = True
                accepted()
                services.deployed.write(api.url, given.file, given.assignments, given.port)
                if wait:
                    services.handover.wait_ready(
                        api,
                        application=deployment.application,
                        url=deployment.url,
                        headers=headers,
                        report=phases.start,
                        timeout_s=timeout_s - phases.elapsed_s,
                    )
            ready_s = phases.elapsed_s
    except KeyboardInterrupt:
        state = "Serve goes on with it; see `tandem status`" if is_accepted else "nothing was changed"
        raise terminal.fail(f"interrupted; {state}", code=EXIT_INTERRUPTED) from None
    if terminal.as_json:
        terminal.emit(event="ready" if wait else "accepted", url=deployment.url, elapsed_s=ready_s)
    elif wait:
        terminal.say(f"ready in {ready_s:.1f} s at {deployment.url}", style="bold green")
    else:
        terminal.say(f"accepted; follow it with `tandem status --dashboard {api.url}`")


def validate(
    context: typer.Context,
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
        kind = check_cluster_file(file)
        if kind is not FileKind.DEPLOYMENT:
            terminal.say(f"{file}: a valid {kind.value}", style="bold green")
            if as_json:
                terminal.emit(valid=True, file=str(file), kind=kind.value)
            return
        deployment = load_deployment(
            file, port=port, assignments=assignments or (), allow_open=allow_open, with_model=True
        )
        checkpoint = check_model(deployment)
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
            terminal.say(
                f"  pool         {name}: {pool['groups']} group(s) of {pool['tensor_parallel']} rank(s)"
            )


def down(context: typer.Context, dashboard: DashboardOption = None, as_json: JsonOption = False) -> None:
    """Stop what is deployed; a `tandem serve` that runs the cluster ends too, as by Ctrl-C."""
    terminal = Terminal(as_json=as_json)
    services = services_of(context)
    with terminal.exit_codes(), Phases(terminal) as phases:
        phases.start("looking for the cluster")
        api = services.open_api(dashboard)
        running = services.running(api)
        deadline = time.monotonic() + _DOWN_TIMEOUT_S
        if running is not None:
            phases.start(f"ending tandem serve (process {running.pid})")
            with suppress(ProcessLookupError):
                os.kill(running.pid, signal.SIGTERM)
            while not _has_ended(api, running):
                _wait_until(deadline, f"tandem serve (process {running.pid}) did not end")
        else:
            names = sorted(api.details().get("applications", {}))
            phases.start(f"stopping {', '.join(names) or 'nothing: no application is deployed'}")
            if names:  # asking for none would start Serve, with its own ideas of ports, where it does not run
                api.remove_applications()
            while api.details().get("applications"):
                _wait_until(deadline, f"Serve still stops {', '.join(names)}")
        if as_json:
            terminal.emit(event="stopped", dashboard=api.url)
        else:
            phases.start("stopped")


def check_unchanged(details: Mapping[str, Any], deployment: Deployment) -> None:
    """Refuse what Serve cannot change while it runs: it would keep the old value without a word."""
    if not details.get("applications"):
        return
    problems = []
    options = details.get("http_options") or {}
    wanted = {"host": deployment.host, "port": deployment.port}
    for key, value in wanted.items():
        if key in options and options[key] != value:
            problems.append(_immutable(f"http_options.{key}", options[key], value, deployment.file))
    location = deployment.tree.get("proxy_location")
    running = details.get("proxy_location")
    if location is not None and running is not None and location != running:
        problems.append(_immutable("proxy_location", running, location, deployment.file))
    if problems:
        raise ConfigError(problems)


def _immutable(path: str, old: object, new: object, file: str) -> Problem:
    return Problem(
        path=path,
        message="needs a new deployment: Serve cannot change it while it runs, the old one keeps serving",
        got=f"{old!r} -> {new!r}",
        hint="`tandem down` first, or keep the old value",
        file=file,
    )


def _has_ended(api: ServeApi, running: RunningCluster) -> bool:
    """Whether a `tandem serve` has taken back what it started: the cluster, or what it put on another's."""
    if process_start(running.pid) == running.process_start:
        return False
    return not (api.is_reachable() if running.gcs_address else api.details().get("applications"))


def _wait_until(deadline: float, complaint: str) -> None:
    if time.monotonic() > deadline:
        raise CommandFailed(f"{complaint} within {_DOWN_TIMEOUT_S:.0f} s; see `tandem status`")
    time.sleep(0.2)


@contextmanager
def _deploy_lock(folder: Path, dashboard_url: str) -> Iterator[None]:
    """One deploy at a time and cluster, of this user on this machine. Names the owner when it is taken."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    name = hashlib.sha256(dashboard_url.encode()).hexdigest()[:16]
    with (folder / f"deploy-{name}.lock").open("a+", encoding="utf-8") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            stream.seek(0)
            owner = stream.read(200).strip() or "an unknown process"
            raise CommandFailed(
                f"another deploy to {dashboard_url} is under way, by {owner}; wait for it or end it"
            ) from None
        stream.truncate(0)
        stream.write(f"{getpass.getuser()}, process {os.getpid()}")
        stream.flush()
        yield
        stream.truncate(0)
