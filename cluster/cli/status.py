"""`tandem status`: every group and router replica, its state in plain words, and its load."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any

import httpx
import typer
from rich.markup import escape

from cluster.cli.keys import key_headers
from cluster.cli.options import DashboardOption, JsonOption, KeysOption
from cluster.cli.services import Services, services_of
from cluster.cli.tables import table
from cluster.cli.terminal import CommandFailed, Terminal, waiting
from cluster.figures.words import counted
from cluster.launch.news import Report
from cluster.replies import ask
from cluster.running.group_table import (
    ApplicationStatus,
    GroupRow,
    PairRow,
    ReportedLoad,
    application_statuses,
    parse_loads,
    parse_pairs,
)
from cluster.running.serve_api import ServeApi, ingress_url
from workers.directory.groups import GroupListing

_COLUMNS = ("group", "role", "state", "node", "ranks", "running", "waiting", "KV", "restarts", "age", "why")
_WORDS = ("group", "role", "state", "node", "ranks")
# By `workers.report.Bound`; nothing is said of an idle group.
_BOUNDS = {"compute": "compute-bound", "bandwidth": "bandwidth-bound", "overhead": "overhead-bound"}
_WATCH_S = 2.0
_STATE_STYLES = {"ready": "green", "failed": "red", "draining": "yellow"}


def status(
    context: typer.Context,
    dashboard: DashboardOption = None,
    gcs_address: Annotated[
        str | None,
        typer.Option(
            "--gcs-address", metavar="HOST:PORT", help="Ray's address; found by itself where possible."
        ),
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show again every two seconds until Ctrl-C.")
    ] = False,
    keys_file: KeysOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what is deployed: groups, state and why, load, restarts. Exit code 1 when not all is ready.
    With --watch --json: a line each time."""
    terminal = Terminal(as_json=as_json, has_lines=watch)
    services = services_of(context)
    with terminal.exit_codes():
        noted = services.note.at(dashboard.rstrip("/")) if dashboard is not None else services.note.read()
        if noted is not None and noted.is_stopping:
            raise CommandFailed(f"`tandem serve` (process {noted.pid}) is stopping")
        with waiting(terminal, "looking for the cluster"):
            api = services.open_api(dashboard)
        running = services.running(api)
        headers = key_headers(keys_file or (running.api_keys_file if running is not None else None))
        address = gcs_address or (running.gcs_address if running is not None else "")
        try:
            while True:
                with waiting(terminal, "asking the cluster"):
                    statuses = _ask(services, api, address, headers, terminal.note)
                _show(terminal, api.url, statuses)
                if not watch:
                    break
                time.sleep(_WATCH_S)
        except KeyboardInterrupt:
            if not watch:
                raise
            return
        if not statuses or not all(status.is_well for status in statuses):
            raise typer.Exit(1)


def _ask(
    services: Services, api: ServeApi, gcs_address: str, headers: Mapping[str, str], report: Report
) -> list[ApplicationStatus]:
    """All who know a part of it. Raises ServeApiError, ProbeError and CommandFailed."""
    try:
        return _joined(services, api, gcs_address, headers, report)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise CommandFailed(
            f"what the Ray dashboard at {api.url} says of its applications is in no known form: is it "
            "another version of Ray?"
        ) from error


def _joined(
    services: Services,
    api: ServeApi,
    gcs_address: str,
    headers: Mapping[str, str],
    report: Report,
) -> list[ApplicationStatus]:
    details = api.details()
    applications: Mapping[str, Any] = details.get("applications", {})
    directories: Mapping[str, GroupListing] = {}
    if applications:
        directories = services.directories(gcs_address, sorted(applications), api.session())
    loads: dict[str, ReportedLoad] = {}
    pairs: list[PairRow] = []
    for name, application in applications.items():
        deployments = application.get("deployments")
        if not deployments or "router" in deployments:  # none: after a refused deploy, the router goes on
            body = _load(details, application.get("route_prefix") or "/", headers, report)
            try:
                loads |= parse_loads(body)
                pairs += parse_pairs(body)
            except (AttributeError, LookupError, TypeError):  # of another version, or another program's
                report(f"{name}: its /load says nothing that this command can read: no loads are shown")
    return application_statuses(details, directories, loads, pairs, now=time.time())


def _load(
    details: Mapping[str, Any], prefix: str, headers: Mapping[str, str], report: Report
) -> Mapping[str, Any]:
    """The body of `/load` of a router of an application, to each of which all its groups tell the same;
    nothing when it does not answer, which is reported, or wants another key."""
    options = details.get("http_options") or {}
    url = ingress_url(options.get("host", "127.0.0.1"), options.get("port", 8000))
    try:
        address = url + prefix.rstrip("/") + "/load"
        with httpx.Client(trust_env=False) as client:
            reply = ask(client, "GET", address, timeout_s=5.0, headers=headers)
        body = reply.json() if reply.status == 200 else {}
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        report(f"{url} does not answer ({error}): no loads are shown")
        return {}
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}


def _show(terminal: Terminal, url: str, statuses: list[ApplicationStatus]) -> None:
    if terminal.as_json:
        terminal.emit(dashboard=url, applications=[asdict(status) for status in statuses])
        return
    if not statuses:
        terminal.say(f"nothing is deployed on {url}; start with `tandem deploy FILE`")
    for application in statuses:
        terminal.say(
            f"{application.name}: {application.status}, {application.ready} of {application.desired} ready",
            style="bold",
        )
        if application.message and not application.is_well:
            terminal.say(f"  {application.message}")
        found = table(*_COLUMNS, left=_WORDS, prose="why")
        for row in application.rows:
            found.add_row(*_cells(row))
        terminal.show(found)
        for row in application.rows:
            if row.usage is not None and row.usage["bound"] in _BOUNDS:
                terminal.say(_usage_line(row.group, row.usage))
        for pair in application.pairs:
            terminal.say(_pair_line(pair))
        groups = [row for row in application.rows if row.leases is not None]
        for row in groups:
            if row.leases:
                terminal.say(f"  {row.group} lends KV blocks: {counted(row.leases, 'lease')} held")
            if row.exchange_problem and len(groups) > 1:
                terminal.say(f"  {row.group} exchanges no KV blocks: {row.exchange_problem}")
        for pool, decision in (application.scaling or {}).get("pools", {}).items():
            terminal.say(_scaling_line(pool, decision))


def _usage_line(group: str, usage: Mapping[str, Any]) -> str:
    """What holds a group's steps up, and how near they come to what its machine can do."""
    return (
        f"  {group} is {_BOUNDS[usage['bound']]}: {usage['compute']:.0%} of the arithmetic and "
        f"{usage['bandwidth']:.0%} of the memory bandwidth of its machine, {usage['busy']:.0%} of the time"
    )


def _scaling_line(pool: str, decision: Mapping[str, Any]) -> str:
    """What autoscaling decided last for a pool, with the groups that each reason asks for."""
    terms = ", ".join(f"{name} {value:g}" for name, value in decision.get("terms", {}).items() if value)
    asked = f" ({terms})" if terms else ""
    return (
        f"  {pool} is to have {decision.get('target')}: {decision.get('reason')}; "
        f"the load asks for {decision.get('needed', 0):g}{asked}"
    )


def _pair_line(pair: PairRow) -> str:
    """How well a group reads the KV blocks of another."""
    by = f" by {pair.transport}" if pair.transport else ""
    failed = f", {pair.num_failed} failed" if pair.num_failed else ""
    rate = "" if pair.bytes_per_s is None else f" at {pair.bytes_per_s / 1e6:.0f} MB/s"
    size = f", {pair.num_bytes / 1e6:.1f} MB{rate}" if pair.num_bytes else ""
    return (
        f"  {pair.reader} reads from {pair.source}{by}: {pair.num_done} done, {pair.num_open} under way"
        f"{failed}{size}"
    )


def _cells(row: GroupRow) -> list[str]:
    style = _STATE_STYLES.get(row.state)
    state = f"[{style}]{row.state}[/]" if style else escape(row.state)
    ranks = " ".join(map(str, row.rank_pids)) or _number(row.front_pid)
    kv = "" if row.kv_percent is None else f"{row.kv_percent:.0f} %"
    age = "" if row.age_s is None else _duration(row.age_s)
    numbers = (_number(row.running), _number(row.waiting), kv, _number(row.restarts), age)
    return [escape(row.group), escape(row.role), state, escape(row.node), ranks, *numbers, escape(row.reason)]


def _number(value: int | None) -> str:
    return "" if value is None else str(value)


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"
