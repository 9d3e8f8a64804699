"""`tandem dashboards`: the pages for Grafana as files, checked, pushed, or drawn without a Grafana."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from cluster.cli.options import ForceOption, JsonOption, finite, http_url, json_lines, named_path
from cluster.cli.outputs import check_output, write_output
from cluster.cli.terminal import EXIT_FAILURE, CommandFailed, Phases, Terminal
from cluster.figures.words import counted
from cluster.observe.answers import Range, ask_page
from cluster.observe.checks import problems
from cluster.observe.grafana_api import GrafanaApi
from cluster.observe.local_prometheus import find_program
from cluster.observe.preview import preview as draw
from cluster.observe.prometheus_api import ObserveError, PrometheusApi
from cluster.observe.promtool import check_rules
from cluster.observe.push import Pushed
from cluster.observe.push import push as push_pages
from dashboards.pages import PAGES, PAGES_FOLDER, files
from dashboards.provisioning import DEFAULT_PROMETHEUS
from workers.regular_file import read_regular

app = typer.Typer(help="Pages for Grafana: build, check, push, preview.", no_args_is_help=True)

_MAX_TOKEN_BYTES = 1 << 16
_MOST_MINUTES = 10 * 365 * 24 * 60.0

PrometheusOption = Annotated[
    str, typer.Option("--prometheus", callback=http_url, metavar="URL", help="A running Prometheus.")
]
MinutesOption = Annotated[
    float, typer.Option("--minutes", callback=finite, min=1, max=_MOST_MINUTES, help="How far to look back.")
]


@app.command()
def build(
    out: Annotated[
        Path,
        typer.Option(
            "-o",
            "--out",
            parser=named_path,
            metavar="FOLDER",
            help="For example Ray's /tmp/ray/session_latest/metrics/grafana.",
        ),
    ],
    grafana_path: Annotated[
        str | None,
        typer.Option(
            "--grafana-path", metavar="FOLDER", help="Where Grafana finds the pages, if not in FOLDER/tandem."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write pages, alert rules, scrape configs and Grafana's provisioning files. What an earlier build wrote
    is written over."""
    terminal = Terminal(as_json=as_json)
    with observe_exit_codes(terminal):
        written = files(grafana_path or str((out / PAGES_FOLDER).absolute()))
        for name, text in written.items():
            file = out / name
            check_output(file, force=True)
            write_output(file, text)
        if as_json:
            terminal.emit(folder=str(out), files=list(written))
        for name in written:
            terminal.say(str(out / name))


@app.command()
def check(
    prometheus: Annotated[
        str | None,
        typer.Option(
            "--prometheus",
            callback=http_url,
            metavar="URL",
            help="Ask every query of it: none empty, none NaN.",
        ),
    ] = None,
    minutes: MinutesOption = 30,
    as_json: JsonOption = False,
) -> None:
    """Check fields, PromQL and names; rules by promtool where it is; and queries of a Prometheus."""
    terminal = Terminal(as_json=as_json)
    with observe_exit_codes(terminal):
        found = problems()
        promtool = find_program("promtool")
        if promtool is not None:
            found += check_rules(promtool)
        asked = 0
        if prometheus is not None:
            api, times = PrometheusApi(prometheus), _last(minutes)
            with Phases(terminal) as phases:
                for page in PAGES.values():
                    phases.start(f"asking Prometheus for {page.title}")
                    for panel, answers in ask_page(api, page, times):
                        asked += len(answers)
                        found += [
                            f"{page.uid}: {panel.title}: {answer.problem}: {answer.expr}"
                            for answer in answers
                            if answer.problem
                        ]
        if as_json:
            terminal.emit(
                pages=list(PAGES), queries_asked=asked, promtool=promtool is not None, problems=found
            )
        for problem in found:
            terminal.say(problem)
        if found and as_json:  # they are in the document
            raise typer.Exit(EXIT_FAILURE)
        if found:
            raise CommandFailed(counted(len(found), "problem"))
        pages, queries = counted(len(PAGES), "page"), counted(asked, "query", "queries")
        rules = "rules by promtool" if promtool is not None else "rules not by promtool, which is not here"
        terminal.say(f"{pages} in order; {rules}; {queries} asked")


@app.command()
def push(
    grafana: Annotated[
        str,
        typer.Option("--grafana", callback=http_url, metavar="URL", help="For example http://grafana:3000."),
    ],
    token_file: Annotated[
        Path, typer.Option("--token-file", metavar="FILE", help="Holds a service account's token.")
    ],
    prometheus: Annotated[
        str | None,
        typer.Option(
            "--prometheus",
            callback=http_url,
            metavar="URL",
            help="As Grafana reaches it: makes a data source of it.",
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Also over what is changed there meanwhile.")
    ] = False,
    as_json: Annotated[bool, json_lines("each of them")] = False,
) -> None:
    """Make folder, data source and pages in a Grafana like ours. Again: nothing changes."""
    terminal = Terminal(as_json=as_json, has_lines=True)
    done: list[Pushed] = []
    with observe_exit_codes(terminal):
        api = GrafanaApi(grafana, _token(token_file))
        try:
            with Phases(terminal) as phases:
                phases.start("pushing to Grafana")
                push_pages(
                    api, PAGES.values(), prometheus=prometheus, overwrite=overwrite, report=done.append
                )
        finally:  # what was done until something failed is said too
            for pushed in done:
                if as_json:
                    terminal.emit(kind=pushed.kind, name=pushed.name, result=pushed.result)
                terminal.say(f"{pushed.result:<10}{pushed.kind} {pushed.name}")


@app.command()
def preview(
    out: Annotated[
        Path, typer.Option("-o", "--out", parser=named_path, metavar="FILE", help="The HTML file.")
    ] = Path("dashboards.html"),
    prometheus: PrometheusOption = DEFAULT_PROMETHEUS,
    minutes: MinutesOption = 30,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Draw every panel from a running Prometheus into one HTML file, without Grafana."""
    terminal = Terminal(as_json=as_json)
    with observe_exit_codes(terminal):
        check_output(out, force=force)
        with Phases(terminal) as phases:
            phases.start("asking Prometheus for every panel")
            text, empty = draw(PrometheusApi(prometheus), PAGES.values(), _last(minutes))
        write_output(out, text)
        if as_json:
            terminal.emit(file=str(out), empty=empty)
        terminal.say(f"{out}, {len(text) >> 10} KiB; {counted(len(empty), 'panel')} without anything to show")


def _last(minutes: float) -> Range:
    """Up to now, in at most some hundred steps."""
    end = time.time()
    step_s = max(5.0, round(minutes * 60 / 240))
    return Range(start=end - minutes * 60, end=end, step_s=step_s)


def _token(file: Path) -> str:
    token = read_regular(file, max_bytes=_MAX_TOKEN_BYTES).decode("utf-8", errors="replace").strip()
    if not token or not token.isascii() or any(character.isspace() for character in token):
        raise CommandFailed(f"{file} holds no token: one line of ASCII, as Grafana shows it once")
    return token


@contextmanager
def observe_exit_codes(terminal: Terminal) -> Iterator[None]:
    """`Terminal.exit_codes`, also for what Prometheus and Grafana do not do."""
    with terminal.exit_codes():
        try:
            yield
        except ObserveError as error:
            raise CommandFailed(str(error)) from error
