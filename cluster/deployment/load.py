"""Everything that can be checked about a deployment before anything is started.

`load_deployment` reads a file, applies the command line, and answers with the deployment or with a
ConfigError that lists every mistake; `check_model` opens what the config names: the model folder (of
weights only the headers) for unsupported or damaged checkpoints and tokenizers, tensor-parallel sizes that do
not divide, pools and context lengths that do not fit; and the files of API keys and of the step cost.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cluster.config.parse import apply_overrides, check_config, parse_config
from cluster.config.pools import deployment_problems
from cluster.config.problems import ConfigError, Problem
from cluster.config.tree import EMBEDDED_MODEL, TandemConfig
from cluster.config.yaml_tree import YamlTree
from cluster.deployment.deployment_file import check_read, grpc_port, in_args, is_ours, read_file
from cluster.deployment.named_files import key_problems, open_model, step_cost_problems
from cluster.models.embedded import EmbeddedModelError, canonical_path, model_folder
from cluster.running.serve_api import ingress_url
from workers.model.checkpoint import Checkpoint

SHIPPED_FILES = Path(__file__).resolve().parents[2] / "deploy"
DEFAULT_FILE = SHIPPED_FILES / "local.yaml"
_COMMAND_LINE = "command line"


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """What is changed in a file without writing it there."""

    port: int | None = None  # --port
    assignments: tuple[str, ...] = ()  # --set

    @property
    def paths(self) -> frozenset[str]:
        """The config's paths that `--set` gives."""
        return frozenset(assignment.partition("=")[0].strip() for assignment in self.assignments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """A checked deployment: what Serve receives, and the parts of it that the commands need."""

    file: str
    tree: dict[str, Any]  # for Serve's API, with --port and --set applied and model.path absolute
    application: str
    config: TandemConfig
    given: CommandLine
    source: YamlTree  # the file as it was read
    index: int  # of its application in there
    host: str
    port: int
    route_prefix: str  # what paths of the API begin with: "/" or "/name"
    num_replicas: dict[str, int]  # by deployment name; the least when autoscaling
    most_replicas: dict[str, int]  # likewise; the most

    @property
    def url(self) -> str:
        """Where the API answers, as seen from this machine."""
        return ingress_url(self.host, self.port) + self.route_prefix.rstrip("/")

    def num_cpus(self) -> int:
        """CPUs that its groups set aside together, as many as there may be."""
        total: float = sum(
            self.most_replicas.get(name, 1) * bundle["CPU"]
            for name, pool in self.config.pools.by_name().items()
            for bundle in pool.bundles()
        )
        return math.ceil(total)


def load_deployment(
    file: Path,
    *,
    port: int | None = None,
    assignments: Sequence[str] = (),
    allow_open: bool = False,
) -> Deployment:
    """The deployment of a file. Raises ConfigError with every mistake found, each with its place."""
    given = CommandLine(port=port, assignments=tuple(assignments))
    return deployment_of(read_deployment(file), str(file), given, allow_open=allow_open)


def read_deployment(file: Path) -> YamlTree:
    """What a file says, not checked yet. Raises ConfigError where there is none."""
    if not file.exists():
        raise ConfigError([_missing_file(file)])
    return read_file(file)


def check_all(
    source: YamlTree, file: str, given: CommandLine, *, allow_open: bool = False
) -> tuple[Deployment, Checkpoint | None]:
    """As `deployment_of` and `check_model`: raises ConfigError with every mistake of both at once."""
    try:
        deployment = deployment_of(source, file, given, allow_open=allow_open)
    except ConfigError as error:
        more = _model_problems_despite(source, given, file)
        raise ConfigError([*error.problems, *more]) from None
    return deployment, check_model(deployment)


def deployment_of(source: YamlTree, file: str, given: CommandLine, *, allow_open: bool = False) -> Deployment:
    """The deployment of a file that was read. Raises ConfigError with every mistake found."""
    problems = [
        *check_read(source, file, allow_open=allow_open),
        *_command_line_problems(source.value, given),
    ]
    if problems:
        raise ConfigError(problems)
    tree = source.value
    index, app = next((i, app) for i, app in enumerate(tree["applications"]) if is_ours(app))
    deployments = app.get("deployments") or ()
    args = apply_overrides(app.get("args") or {}, given.assignments)
    config, problems = check_config(args)
    if config is not None:
        problems = list(deployment_problems(config, deployments))
    if config is None or problems:  # each part alone was right, so it is a value of --set
        raise ConfigError(replace(problem, file=_COMMAND_LINE) for problem in problems)
    # Processes of the cluster have other working folders and, elsewhere, another home.
    model = replace(config.model, path=canonical_path(config.model.path))
    args = {**args, "model": {**(args.get("model") or {}), "path": model.path}}
    args, config = _with_absolute_drafts(args, config)
    http = {**(tree.get("http_options") or {}), **({} if given.port is None else {"port": given.port})}
    applications = list(tree["applications"])
    applications[index] = {**app, "args": args}
    return Deployment(
        file=file,
        tree={**tree, "http_options": http, "applications": applications},
        application=app.get("name", "default"),
        config=config.model_copy(update={"model": model}),
        given=given,
        source=source,
        index=index,
        host=http.get("host", "0.0.0.0"),
        port=http.get("port", 8000),
        route_prefix=app.get("route_prefix", "/"),
        num_replicas={entry["name"]: _replicas(entry, "min_replicas") for entry in deployments},
        most_replicas={entry["name"]: _replicas(entry, "max_replicas") for entry in deployments},
    )


def _with_absolute_drafts(args: dict[str, Any], config: TandemConfig) -> tuple[dict[str, Any], TandemConfig]:
    """The same with the folders of draft models as absolute paths."""
    found = [
        f"pools.{name}.speculative.model={json.dumps(os.path.abspath(os.path.expanduser(folder)))}"
        for name, pool in config.pools.by_name().items()
        if (folder := pool.speculative.model)
    ]
    if not found:
        return args, config
    args = apply_overrides(args, found)
    return args, parse_config(args)


def check_model(deployment: Deployment) -> Checkpoint | None:
    """The opened model folder; None when it is the embedded model and not converted yet. Looks at the file
    of API keys too.

    Raises ConfigError naming file and cause.
    """
    checkpoint, problems = _open_model(deployment.config)
    if problems:
        where = deployment.source, deployment.index, deployment.file
        raise ConfigError(_placed(problem, *where, deployment.given) for problem in problems)
    return checkpoint


def _open_model(config: TandemConfig) -> tuple[Checkpoint | None, list[Problem]]:
    """The model folder, and what does not fit it or is wrong with the other files that are named."""
    checkpoint: Checkpoint | None = None
    problems: list[Problem] = []
    try:
        folder = model_folder(config.model.path)
        if canonical_path(config.model.path) != EMBEDDED_MODEL or folder.exists():
            checkpoint, problems = open_model(config, folder)
    except EmbeddedModelError as error:
        problems = [Problem(path="model.path", message=str(error))]
    return checkpoint, [*problems, *key_problems(config), *step_cost_problems(config)]


def _placed(problem: Problem, source: YamlTree, index: int, file: str, given: CommandLine) -> Problem:
    """A mistake of a config where it was made: in the file or on the command line."""
    if problem.path in given.paths:
        return replace(problem, file=_COMMAND_LINE)
    return replace(in_args(problem, source, index), file=file)


def _model_problems_despite(source: YamlTree, given: CommandLine, file: str) -> list[Problem]:
    """Mistakes of the model in a file that has others too, as far as its config can be read."""
    applications = source.value.get("applications") if isinstance(source.value, dict) else None
    for index, app in enumerate(applications if isinstance(applications, list) else ()):
        args = app.get("args") if is_ours(app) else None
        if not isinstance(args, dict):
            continue
        with suppress(ConfigError):
            args = apply_overrides(args, given.assignments)
        config, _ = check_config(args)
        if config is None:  # the model's own part may be right
            config, _ = check_config({"model": args["model"]} if "model" in args else {})
        if config is not None:
            problems = _open_model(config)[1]
            return [_placed(problem, source, index, file, given) for problem in problems]
    return []


def _command_line_problems(tree: Any, given: CommandLine) -> list[Problem]:
    """What is wrong with `--port`, and with the paths of `--set`."""
    problems = []
    if given.port is not None:
        got = str(given.port)
        if not 1024 <= given.port <= 65535:
            message = "port out of range"
            problems.append(Problem(path="--port", message=message, got=got, allowed="1024 to 65535"))
        if isinstance(tree, dict) and given.port == grpc_port(tree):
            hint = "grpc_options.port is the same"
            problems.append(Problem(path="--port", message="the port is given twice", got=got, hint=hint))
    try:
        apply_overrides({}, given.assignments)
    except ConfigError as error:
        problems += error.problems
    return [replace(problem, file=_COMMAND_LINE) for problem in problems]


def _missing_file(file: Path) -> Problem:
    shipped = ", ".join(f"deploy/{found.name}" for found in sorted(SHIPPED_FILES.glob("*.yaml")))
    return Problem(path="", message="no such file", hint=f"Tandem ships {shipped}", file=str(file))


def _replicas(entry: dict[str, Any], bound: str) -> int:
    scaling = entry.get("autoscaling_config")
    if isinstance(scaling, dict):
        return int(scaling.get(bound, 1))
    replicas = entry.get("num_replicas")
    return replicas if isinstance(replicas, int) else 1
