"""A deployment on its way to a running cluster, as `tandem deploy` and `tandem scale` send it."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from cluster.cli.keys import key_headers
from cluster.cli.services import Services
from cluster.cli.terminal import EXIT_INTERRUPTED, CommandFailed, Phases, Terminal
from cluster.config.problems import ConfigError, Problem
from cluster.config.tree import EMBEDDED_MODEL
from cluster.deployment.load import Deployment, check_model
from cluster.deployment.pool_switch import CannotStandTogether, deployment_in_between
from cluster.launch.errors import LaunchError, NotReadyInTime, TakenAway
from cluster.launch.news import Report
from cluster.running.deployed import DeployedFile
from cluster.running.serve_api import ServeApi, ServeApiError


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of it, for programs."""

    event: str  # ready, or accepted
    url: str
    elapsed_s: float


class State(Enum):
    """How far a deployment has come, as it is said when the command ends early."""

    UNSENT = "nothing was changed"
    SENT = "Serve may have taken it; see `tandem status`"  # it was asked, and has not answered
    BETWEEN = "the old pool stays beside the new ones until this is deployed again"
    ACCEPTED = "Serve goes on with it; see `tandem status`"


@dataclass(slots=True, kw_only=True)
class Rollout:
    """What is sent, where to, and how far it has come."""

    deployment: Deployment
    given: DeployedFile  # what it was made of, to be remembered
    dashboard: str | None  # --dashboard
    wait: bool  # until every group has answered
    timeout_s: float  # of each step, of two where other pools take over
    state: State = State.UNSENT

    def run(self, terminal: Terminal, services: Services) -> Outcome:
        """Make the cluster look like the deployment, and say so to people. Raises what the commands turn into
        exit codes."""
        try:
            with Phases(terminal) as phases:
                phases.start("looking for the cluster")
                api = find_cluster(services, self.dashboard)
                with _deploy_lock(services.locks, api.url):
                    self._send(api, services, phases)
                ready_s = phases.elapsed_s
        except KeyboardInterrupt:
            raise terminal.fail(f"interrupted; {self.state.value}", code=EXIT_INTERRUPTED) from None
        url = self.deployment.url
        if self.wait:
            terminal.say(f"ready in {ready_s:.1f} s at {url}", style="bold green")
        else:
            terminal.say(f"accepted; follow it with `tandem status --dashboard {api.url}`")
        return Outcome(event="ready" if self.wait else "accepted", url=url, elapsed_s=round(ready_s, 2))

    def _send(self, api: ServeApi, services: Services, phases: Phases) -> None:
        deployment = self.deployment
        headers = key_headers(deployment.config.router.http.api_keys_file) if self.wait else {}
        if deployment.config.model.path == EMBEDDED_MODEL:
            services.ensure_model(phases.start)
        check_model(deployment)
        details = api.details()
        check_unchanged(details, deployment)
        between = _in_between(deployment, details, phases.start) if self.wait else None
        began_s = 0.0
        if between is not None:
            try:
                self._hand_over(between.tree, api, services, phases, headers, began_s)
                began_s = phases.elapsed_s
            except TakenAway:
                raise
            except LaunchError as error:
                late = (
                    "; where there is no room for it, its extra groups of max_surge_percent and the new ones "
                    "at once, --no-wait ends it first"
                )
                hint = late if isinstance(error, NotReadyInTime) else ""
                raise LaunchError(f"{error}; the old pool goes on answering{hint}") from error
        self._hand_over(deployment.tree, api, services, phases, headers, began_s)

    def _hand_over(
        self,
        tree: Mapping[str, Any],
        api: ServeApi,
        services: Services,
        phases: Phases,
        headers: Mapping[str, str],
        began_s: float,
    ) -> None:
        """One step, whose time runs from `began_s` of the phases."""
        deployment, given = self.deployment, self.given
        left_s = began_s + self.timeout_s - phases.elapsed_s
        before, self.state = self.state, State.SENT
        try:
            services.handover.deploy(api, tree, report=phases.start, timeout_s=left_s)
        except LaunchError as error:
            self.state = before
            if before is State.BETWEEN:
                raise LaunchError(f"{error}; {before.value}") from error
            raise
        self.state = State.ACCEPTED if tree is deployment.tree else State.BETWEEN
        services.deployed.write(api.url, given.file, given.assignments, given.port)
        if self.wait:
            services.handover.wait_ready(
                api,
                application=deployment.application,
                url=deployment.url,
                headers=headers,
                report=phases.start,
                timeout_s=began_s + self.timeout_s - phases.elapsed_s,
            )


def _in_between(deployment: Deployment, details: Mapping[str, Any], report: Report) -> Deployment | None:
    """See `deployment_in_between`; None, too, when there can be none."""
    try:
        between = deployment_in_between(deployment, details)
    except CannotStandTogether as error:
        report(f"old and new pools cannot stand together ({error}): requests will wait")
        return None
    if between is not None:
        report("the old pool answers until the new ones do, which are started with it first")
    return between


def find_cluster(services: Services, dashboard: str | None) -> ServeApi:
    """Serve's API of the cluster asked for. Raises CommandFailed, saying how to get one."""
    try:
        return services.open_api(dashboard)
    except ServeApiError as error:
        raise CommandFailed(
            f"{error}; start one with `tandem serve` or `ray start --head`, "
            "or name its dashboard with --dashboard URL"
        ) from error


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
        stream.write(f"process {os.getpid()}")
        stream.flush()
        yield
        stream.truncate(0)
