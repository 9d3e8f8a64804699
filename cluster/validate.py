"""Everything that can be checked about a deployment before anything is started.

`load_deployment` reads a file, applies `--port` and `--set`, and answers with the deployment or with a
ConfigError that lists every mistake; `check_model` then opens the model folder (headers only) and compares
it with the config: unsupported or damaged checkpoints, tensor-parallel sizes that do not divide, context
lengths beyond the model's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cluster.config import apply_overrides, check_config
from cluster.config_tree import EMBEDDED_MODEL, TandemConfig
from cluster.embedded import EmbeddedModelError, model_folder
from cluster.problems import ConfigError, Problem
from cluster.serve_schema import IMPORT_PATH, check_file
from workers.model.checkpoint import Checkpoint
from workers.model.errors import CheckpointError, TensorParallelError
from workers.model.spec import check_tensor_parallel

SHIPPED_FILES = Path(__file__).resolve().parent.parent / "deploy"
DEFAULT_FILE = SHIPPED_FILES / "local.yaml"
_COMMAND_LINE = "command line"


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """A checked deployment: what Serve receives, and the parts of it that the commands need."""

    file: str
    tree: dict[str, Any]  # for Serve's API, with --port and --set applied
    application: str
    config: TandemConfig
    host: str
    port: int
    num_replicas: dict[str, int]  # by deployment name; the least when autoscaling

    @property
    def url(self) -> str:
        """Where the API answers, as seen from this machine."""
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    def num_cpus(self) -> int:
        """CPUs that its groups set aside together."""
        total: float = sum(
            self.num_replicas.get(name, 1) * bundle["CPU"]
            for name, pool in self.config.pools.by_name().items()
            for bundle in pool.bundles()
        )
        return math.ceil(total)


def load_deployment(
    file: Path, *, port: int | None = None, assignments: Sequence[str] = (), allow_open: bool = False
) -> Deployment:
    """The deployment of a file. Raises ConfigError with every mistake found, each with its place."""
    if not file.exists():
        raise ConfigError([_missing_file(file)])
    tree, problems = check_file(file, allow_open=allow_open)
    problems += _command_line_problems(port, assignments)
    if problems:
        raise ConfigError(problems)
    index, app = next(
        (i, app) for i, app in enumerate(tree["applications"]) if app.get("import_path") == IMPORT_PATH
    )
    args = apply_overrides(app.get("args") or {}, assignments)
    config, problems = check_config(args)
    if config is None:  # each part alone was right, so it is a value of --set
        raise ConfigError(replace(problem, file=_COMMAND_LINE) for problem in problems)
    http = {**(tree.get("http_options") or {}), **({} if port is None else {"port": port})}
    applications = list(tree["applications"])
    applications[index] = {**app, "args": args}
    return Deployment(
        file=str(file),
        tree={**tree, "http_options": http, "applications": applications},
        application=app.get("name", "default"),
        config=config,
        host=http.get("host", "0.0.0.0"),
        port=http.get("port", 8000),
        num_replicas={
            entry["name"]: _least_replicas(entry) for entry in app.get("deployments") or () if "name" in entry
        },
    )


def check_model(deployment: Deployment) -> Checkpoint | None:
    """The opened model folder; None when it is the embedded model and not converted yet.

    Raises ConfigError naming folder and cause.
    """
    config, place = deployment.config, deployment.file
    try:
        folder = model_folder(config.model.path)
        if config.model.path == EMBEDDED_MODEL and not folder.exists():
            return None
        checkpoint = Checkpoint(folder)
    except (EmbeddedModelError, CheckpointError) as error:
        raise ConfigError([Problem(path="model.path", message=str(error), file=place)]) from error
    problems = []
    length = config.model.max_model_len
    if length is not None and length > checkpoint.max_model_len:
        problems.append(
            Problem(
                path="model.max_model_len",
                message=f"longer than {folder.name} can",
                got=str(length),
                allowed=f"at most {checkpoint.max_model_len}",
                file=place,
            )
        )
    for name, pool in config.pools.by_name().items():
        try:
            check_tensor_parallel(checkpoint.spec, pool.tensor_parallel)
        except TensorParallelError as error:
            path = f"pools.{name}.tensor_parallel"
            problems.append(Problem(path=path, message=str(error), file=place))
    if problems:
        raise ConfigError(problems)
    return checkpoint


def _command_line_problems(port: int | None, assignments: Sequence[str]) -> list[Problem]:
    """What is wrong with `--port`, and with the paths of `--set`."""
    problems = []
    if port is not None and not 1024 <= port <= 65535:
        message = "port out of range"
        problems.append(Problem(path="--port", message=message, got=str(port), allowed="1024 to 65535"))
    try:
        apply_overrides({}, assignments)
    except ConfigError as error:
        problems += error.problems
    return [replace(problem, file=_COMMAND_LINE) for problem in problems]


def _missing_file(file: Path) -> Problem:
    shipped = ", ".join(f"deploy/{found.name}" for found in sorted(SHIPPED_FILES.glob("*.yaml")))
    return Problem(path="", message="no such file", hint=f"Tandem ships {shipped}", file=str(file))


def _least_replicas(entry: dict[str, Any]) -> int:
    scaling = entry.get("autoscaling_config")
    if isinstance(scaling, dict):
        return int(scaling.get("min_replicas", 1))
    replicas = entry.get("num_replicas")
    return replicas if isinstance(replicas, int) else 1
