"""`tandem scale prefill=2`: another number of groups in the deployment file, and the file deployed."""

from __future__ import annotations

import difflib
import hashlib
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from cluster.cli.numbers import whole_number
from cluster.cli.options import DashboardOption, JsonOption, OpenOption, SetOption, StepReadyOption
from cluster.cli.rollout import Rollout, State, find_cluster
from cluster.cli.services import Services, services_of
from cluster.cli.terminal import EXIT_INTERRUPTED, CommandFailed, Terminal, waiting
from cluster.config.problems import ConfigError, Problem
from cluster.config.yaml_tree import MAX_BYTES, read_yaml
from cluster.deployment.load import CommandLine, Deployment, deployment_of
from cluster.deployment.replicas import with_replicas
from cluster.running.deployed import DeployedFile
from cluster.whole_file import replace_file
from workers.file_lock import file_lock
from workers.regular_file import read_regular

_MOST = 1024
_EDIT_S = 10.0  # that another command may take to write the file

Words = Annotated[
    list[str],
    typer.Argument(
        metavar="POOL=N... [FILE]", help="Groups of each pool; the file is the one deployed last."
    ),
]


def scale(
    context: typer.Context,
    words: Words,
    assignments: SetOption = None,
    dashboard: DashboardOption = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the change and make none.")] = False,
    wait: Annotated[bool, typer.Option(help="Wait until every group has answered.")] = True,
    timeout_s: StepReadyOption = 900.0,
    allow_open: OpenOption = False,
    as_json: JsonOption = False,
) -> None:
    """Change how many groups pools have: edits num_replicas in the deployment file, shows it, deploys it."""
    terminal = Terminal(as_json=as_json)
    services = services_of(context)
    with terminal.exit_codes():
        wanted, named = _read_words(words)
        with waiting(terminal, "looking for the cluster"):
            given = _file_of(services, dashboard, named, assignments or ())
        file = Path(os.path.realpath(given.file))  # a link goes on pointing there
        before = _text_of(file)
        pools = _deployment_of(before, given, allow_open).config.pools.by_name()
        after = with_replicas(before, wanted, pools=pools, file=given.file)
        rollout = Rollout(
            deployment=_deployment_of(after, given, allow_open),
            given=given,
            dashboard=dashboard,
            wait=wait,
            timeout_s=timeout_s,
        )
        diff = _diff(before, after, given.file)
        change = {"file": given.file, "replicas": wanted, "diff": diff}
        _show(terminal, diff, given)
        if dry_run or not diff:
            if as_json:
                terminal.emit(event="change" if diff else "unchanged", **change)
            return
        if not yes and not _confirmed(terminal):
            raise CommandFailed("nothing was changed")
        if not _changed(file, before, after, services.locks):
            raise CommandFailed(f"{given.file} has been changed by someone else meanwhile; run this again")
        try:
            done = rollout.run(terminal, services)
        finally:
            if rollout.state is State.UNSENT:
                _take_back(file, after, before, services.locks, terminal)
        if as_json:
            terminal.emit(**asdict(done), **change)


def _text_of(file: Path) -> str:
    """The file as it is, with its own ends of lines. Raises CommandFailed and OSError."""
    try:
        return read_regular(file, max_bytes=MAX_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        raise CommandFailed(
            f"{file} is not UTF-8; change num_replicas by hand, then `tandem deploy {file}`"
        ) from error


def _changed(file: Path, before: str, after: str, locks: Path) -> bool:
    """Whether the file said what it was to say before, and now says the other; of several commands at once
    it is one. Raises OSError."""
    locks.mkdir(mode=0o700, parents=True, exist_ok=True)
    name = hashlib.sha256(os.fsencode(file)).hexdigest()[:16]
    with file_lock(locks / f"edit-{name}.lock", timeout_s=_EDIT_S):
        if _text_of(file) != before:
            return False
        replace_file(file, after, mode=file.stat().st_mode & 0o777)
        return True


def _take_back(file: Path, after: str, before: str, locks: Path, terminal: Terminal) -> None:
    """What hinders it is a note: why it was not deployed is what people have to read."""
    try:
        if not _changed(file, after, before, locks):
            text = f"{file} has been changed by someone else meanwhile, and is left as it is"
            terminal.note(text, event="note")
    except (CommandFailed, OSError) as error:
        terminal.note(f"{file} still says what could not be deployed: {error}", event="note")


def _deployment_of(text: str, given: DeployedFile, allow_open: bool) -> Deployment:
    """What a text would deploy, with what was deployed on the command line. Raises ConfigError."""
    command_line = CommandLine(port=given.port, assignments=given.assignments)
    return deployment_of(read_yaml(text), given.file, command_line, allow_open=allow_open)


def _read_words(words: Sequence[str]) -> tuple[dict[str, int], str | None]:
    """Numbers by pool, and the file if one is named. Raises ConfigError."""
    wanted: dict[str, int] = {}
    files = [word for word in words if "=" not in word]
    problems = []
    for word in words:
        name, equals, text = word.partition("=")
        if not equals:
            continue
        if (number := whole_number(text, most=_MOST)) is None:
            problems.append(Problem(path=name, message="not a number of groups", got=repr(text)[:100],
                                    allowed=f"0 to {_MOST}"))  # fmt: skip
        elif name in wanted:
            problems.append(Problem(path=name, message="the pool is given twice", got=word))
        else:
            wanted[name] = number
    if len(files) > 1:
        problems.append(Problem(path="", message="more than one file", got=", ".join(files)))
    if not wanted and not problems:
        problems.append(Problem(path="", message="no pool is named", allowed="POOL=N, as in unified=2"))
    if problems:
        raise ConfigError(replace(problem, file="command line") for problem in problems)
    return wanted, files[0] if files else None


def _file_of(
    services: Services, dashboard: str | None, named: str | None, assignments: Sequence[str]
) -> DeployedFile:
    """The file to change: the one named, or the one that was deployed last on the cluster, in both cases with
    what was set on the command line then. Raises CommandFailed."""
    known = services.deployed.read(find_cluster(services, dashboard).url)
    if named is None and known is None:
        raise CommandFailed(
            "no file is known of what runs there (it was not deployed by `tandem serve` or `tandem deploy` "
            "from this account); name it: tandem scale POOL=N FILE"
        )
    file = os.path.abspath(named) if named is not None else known.file if known is not None else ""
    if known is None or known.file != file:
        known = DeployedFile(file=file)
    if not os.path.exists(file):
        raise CommandFailed(f"{file} is not there; name the deployment file: tandem scale POOL=N FILE")
    latest = {word.partition("=")[0].strip(): word for word in (*known.assignments, *assignments)}
    return replace(known, assignments=tuple(latest.values()))  # of two for one option, the last one counts


def _diff(before: str, after: str, file: str) -> list[str]:
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), file, file, lineterm="", n=1)
    return list(lines)


def _show(terminal: Terminal, diff: Sequence[str], given: DeployedFile) -> None:
    if not diff:
        terminal.say(f"{given.file} says so already; `tandem deploy {given.file}` deploys it again")
        return
    for line in diff:
        style = {"+": "green", "-": "red"}.get(line[:1], "")
        terminal.say(line, style=style)
    if given.assignments:
        terminal.say(f"with --set {' --set '.join(given.assignments)}")


def _confirmed(terminal: Terminal) -> bool:
    """Raises CommandFailed where nobody is there to ask, and what ends the command after Ctrl-C."""
    if terminal.as_json or not sys.stdin.isatty():
        raise CommandFailed("nobody is there to ask; pass --yes to make the change")
    try:
        return typer.confirm("Deploy this?", default=True, err=True)
    except typer.Abort:
        typer.echo(err=True)  # the question's line ends
        raise terminal.fail("interrupted; nothing was changed", code=EXIT_INTERRUPTED) from None
