"""`tandem metrics`: a Prometheus on this machine that scrapes a cluster, until Ctrl-C."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from cluster.cli.dashboards import observe_exit_codes
from cluster.cli.options import DashboardOption, KeysOption, json_lines
from cluster.cli.services import DEFAULT_DASHBOARD, services_of
from cluster.cli.signals import interrupts
from cluster.cli.terminal import CommandFailed, Terminal, UsageError, waiting
from cluster.observe.local_prometheus import need_prometheus, running
from cluster.running.serve_api import read_token
from dashboards import scrape
from router.api.auth import read_api_keys

app = typer.Typer(help="Prometheus for a cluster.", no_args_is_help=True)


_TARGET = re.compile(r"(?:[^\s/@:\[\]]+|\[[0-9A-Fa-f:.]+\]):(\d{1,5})")
_MOST_PORT = 65535


def _host_and_port(value: str | None) -> str | None:
    """For an option."""
    if value is None:
        return None
    found = _TARGET.fullmatch(value)
    if found is None or not 1 <= int(found[1]) <= _MOST_PORT:
        raise typer.BadParameter("it must be like HOST:PORT, without http:// and path.")
    return value


@app.callback()
def metrics() -> None:
    """Prometheus for a cluster."""


@app.command()
def up(
    context: typer.Context,
    dashboard: DashboardOption = None,
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            callback=_host_and_port,
            metavar="HOST:PORT",
            help="Scrape one application's /metrics instead of Ray's nodes.",
        ),
    ] = None,
    keys_file: KeysOption = None,
    port: Annotated[
        int, typer.Option("--port", min=1, max=65535, help="Where Prometheus listens, on loopback.")
    ] = 9090,
    as_json: Annotated[bool, json_lines("each of: it is ready, it has stopped")] = False,
) -> None:
    """Start Debian's Prometheus on this machine, scraping a running cluster. Ctrl-C ends it with its data."""
    terminal = Terminal(as_json=as_json, has_lines=True)
    with observe_exit_codes(terminal):
        if target is None and keys_file is not None:
            raise UsageError("--api-keys-file is for --target: the nodes of Ray ask for no API key")
        program = need_prometheus()
        if target is not None:
            config, scraped = _plain(target, keys_file), target
        else:
            note = services_of(context).note.read()
            scraped = (dashboard or (note.dashboard_url if note is not None else DEFAULT_DASHBOARD)).rstrip(
                "/"
            )
            config = through_ray(scraped, read_token())
        with interrupts():
            try:
                with ExitStack() as stack:
                    with waiting(terminal, "starting Prometheus"):
                        prometheus = stack.enter_context(running(program, config, port=port))
                    if as_json:
                        terminal.emit(event="ready", url=prometheus.url, scrapes=scraped)
                    terminal.say(f"Prometheus at {prometheus.url} scrapes {scraped}; Ctrl-C stops it.")
                    terminal.say(f"tandem dashboards preview --prometheus {prometheus.url}")
                    code = prometheus.wait()
            except KeyboardInterrupt:
                if as_json:
                    terminal.emit(event="stopped")
                terminal.say("stopped")
                return
        raise CommandFailed(f"Prometheus ended by itself (exit {code})")


Config = Callable[[Path], Mapping[str, Any]]


def through_ray(dashboard: str, token: str | None) -> Config:
    """Scrapes all nodes of a cluster, by its dashboard; `token`: Ray's, when it wants one."""

    def config(folder: Path) -> Mapping[str, Any]:
        return scrape.through_ray(
            dashboard,
            token_file=None if token is None else _secret(folder / "token", token),
            rules=str(folder / "alerts.yml"),
        )

    return config


def _plain(target: str, keys_file: str | None) -> Config:
    def config(folder: Path) -> Mapping[str, Any]:
        key = None
        if keys_file is not None:
            try:
                key = _secret(folder / "key", read_api_keys(keys_file)[0].decode())
            except ValueError as error:
                raise CommandFailed(str(error)) from error
        return scrape.plain(target, keys_file=key, rules=str(folder / "alerts.yml"))

    return config


def _secret(file: Path, text: str) -> str:
    """Writes what only its owner may read; gives the path."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        stream.write(text)
    return str(file)
