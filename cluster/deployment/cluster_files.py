"""Files that bring machines up: clusters of `ray up`, and KubeRay's RayService, told by their top level.

A cluster file is checked against Ray's own schema, every mistake with its line. Of a RayService the parts
that Tandem depends on are checked (Kubernetes checks the rest when it is applied), and the deployment inside
it as strictly as a file of its own.
"""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from enum import Enum
from pathlib import Path as FilePath
from typing import Any

import click
import jsonschema
import ray.autoscaler
from ray.autoscaler._private.util import prepare_config, validate_config

from cluster.config.problems import ConfigError, Problem, join, unknown_key
from cluster.config.yaml_tree import Path, YamlTree, read_yaml
from cluster.deployment.deployment_file import check_tree

_API_VERSION = "ray.io/v1"
# Fields of KubeRay 1.7's RayService, one level after the other.
_SERVICE = {
    "deploymentUnhealthySecondThreshold", "excludeHeadPodFromServeSvc", "managedBy", "rayClusterConfig",
    "rayClusterDeletionDelaySeconds", "serveConfigV2", "serveService", "serviceUnhealthySecondThreshold",
    "suspend", "upgradeStrategy",
}  # fmt: skip
_CLUSTER = {
    "authOptions", "autoscalerOptions", "enableInTreeAutoscaling", "gcsFaultToleranceOptions",
    "headGroupSpec", "headServiceAnnotations", "historyServerOptions", "managedBy", "networkPolicy",
    "rayVersion", "suspend", "tlsOptions", "upgradeStrategy", "workerGroupSpecs",
}  # fmt: skip
_HEAD = {
    "enableIngress", "headService", "ingressOptions", "labels", "rayStartParams", "resources",
    "serviceType", "template",
}  # fmt: skip
_WORKERS = {
    "groupName", "idleTimeoutSeconds", "labels", "maxReplicas", "minReplicas", "numOfHosts", "priority",
    "rayStartParams", "replicas", "resources", "scaleStrategy", "suspend", "template",
}  # fmt: skip

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,252}")
# Its schema leaves values open, which its code then takes for what they should be.
_OF_RAY = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, OSError, RuntimeError,
    TypeError, ValueError, click.ClickException, jsonschema.ValidationError,
)  # fmt: skip


class FileKind(Enum):
    """What a YAML file is for; the values are for people."""

    DEPLOYMENT = "deployment"
    RAY_CLUSTER = "cluster of `ray up`"
    RAY_SERVICE = "RayService of KubeRay"


def kind_of(tree: object) -> FileKind:
    """The kind by the top level; whatever is nothing else is a deployment."""
    if isinstance(tree, Mapping):
        if "apiVersion" in tree or "kind" in tree:
            return FileKind.RAY_SERVICE
        if "provider" in tree or "cluster_name" in tree:
            return FileKind.RAY_CLUSTER
    return FileKind.DEPLOYMENT


def check_cluster_file(tree: YamlTree, file: str) -> FileKind:
    """The kind of a file that was read. One that brings machines up is checked: raises ConfigError with every
    mistake."""
    kind = kind_of(tree.value)
    if kind is FileKind.DEPLOYMENT:
        return kind
    check = _ray_cluster if kind is FileKind.RAY_CLUSTER else _ray_service
    problems = [*tree.problems, *(check(tree) if not tree.problems else ())]
    if problems:
        problems.sort(key=lambda problem: problem.line or 0)
        raise ConfigError(replace(problem, file=file) for problem in problems)
    return kind


def _ray_cluster(tree: YamlTree) -> Iterator[Problem]:
    """What Ray would refuse, and commands that start a cluster which takes commands from anyone."""
    schema = json.loads((FilePath(ray.autoscaler.__file__).parent / "ray-schema.json").read_bytes())
    mistakes = [
        problem
        for error in jsonschema.Draft7Validator(schema).iter_errors(tree.value)
        for problem in _of_schema(tree, error)
    ]
    yield from mistakes
    if not mistakes:
        try:
            # It prints and logs, and raises too.
            with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), _no_log():
                validate_config(prepare_config(tree.value))
        except _OF_RAY as error:
            yield tree.problem((), f"Ray does not take it: {(str(error) or repr(error)).splitlines()[0]}")
    name = tree.value.get("cluster_name")
    if isinstance(name, str) and not _NAME.fullmatch(name):  # files are called after it
        got = repr(name)[:100]
        yield tree.problem(("cluster_name",), "not a name", got=got, allowed="letters, digits, . _ and -")
    yield from _machines(tree)
    for key in ("head_start_ray_commands", "worker_start_ray_commands"):
        commands = tree.value.get(key)
        for i, command in enumerate(commands if isinstance(commands, list) else ()):
            if "ray start" in str(command) and "RAY_AUTH_MODE=token" not in str(command):
                hint = "begin the command with export RAY_AUTH_MODE=token;"
                yield tree.problem((key, i), "Ray would take commands from anyone", hint=hint)


def _machines(tree: YamlTree) -> Iterator[Problem]:
    """Addresses of machines that are there already: Ray takes anything for one, and hands it to ssh."""
    provider = tree.value.get("provider")
    if not isinstance(provider, dict) or provider.get("type") != "local":
        return
    places: list[tuple[Path, Any]] = []
    if "head_ip" in provider:
        places.append((("provider", "head_ip"), provider["head_ip"]))
    workers = provider.get("worker_ips")
    for i, worker in enumerate(workers if isinstance(workers, list) else ()):
        places.append((("provider", "worker_ips", i), worker))
    first: dict[str, Path] = {}
    for place, host in places:
        if not isinstance(host, str) or not _HOST.fullmatch(host):
            yield tree.problem(place, "not an address or name of a machine", got=repr(host)[:100])
        elif host in first:
            hint = f"first as {join(*first[host])}"
            yield tree.problem(place, "the machine is given twice", got=host, hint=hint)
        else:
            first[host] = place


@contextmanager
def _no_log() -> Iterator[None]:
    """Inside, nobody logs below an error."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def _of_schema(tree: YamlTree, error: jsonschema.ValidationError) -> Iterator[Problem]:
    """A finding of Ray's schema in our form."""
    path = tuple(error.absolute_path)
    if error.validator != "additionalProperties" or not isinstance(error.instance, dict):
        yield tree.problem(path, error.message)
        return
    known = error.schema.get("properties", {})
    for key in error.instance:
        if key not in known:
            yield unknown_key(join(*path, key), key, known, line=tree.line_of((*path, key)))


def _ray_service(tree: YamlTree) -> Iterator[Problem]:
    value = tree.value
    for key, wanted in (("apiVersion", _API_VERSION), ("kind", "RayService")):
        if value.get(key) != wanted:
            yield tree.problem((key,), "not what KubeRay reads", allowed=wanted)
    spec = value.get("spec")
    if not isinstance(spec, dict):
        yield tree.problem(("spec",), "must be given")
        return
    yield from _unknown_keys(tree, ("spec",), _SERVICE)
    yield from _pods(tree, spec.get("rayClusterConfig"))
    inner = spec.get("serveConfigV2")
    if not isinstance(inner, str):
        yield tree.problem(("spec", "serveConfigV2"), "must be given, as text")
        return
    yield from _deployment_inside(tree, inner)


def _pods(tree: YamlTree, cluster: Any) -> Iterator[Problem]:
    base: Path = ("spec", "rayClusterConfig")
    if not isinstance(cluster, dict):
        yield tree.problem(base, "must be given")
        return
    yield from _unknown_keys(tree, base, _CLUSTER)
    options = cluster.get("authOptions")
    if not isinstance(options, dict) or options.get("mode") != "token":
        yield tree.problem(
            (*base, "authOptions"), "Ray would take commands from anyone", allowed="{mode: token}"
        )
    head, workers = cluster.get("headGroupSpec"), cluster.get("workerGroupSpecs")
    if not isinstance(head, dict) or "template" not in head:
        yield tree.problem((*base, "headGroupSpec"), "must be given, with a template")
    yield from _unknown_keys(tree, (*base, "headGroupSpec"), _HEAD)
    for i, group in enumerate(workers if isinstance(workers, list) else ()):
        here: Path = (*base, "workerGroupSpecs", i)
        yield from _unknown_keys(tree, here, _WORKERS)
        for key in ("groupName", "minReplicas", "maxReplicas", "template"):
            if not isinstance(group, dict) or key not in group:
                yield tree.problem((*here, key), "must be given")


def _unknown_keys(tree: YamlTree, path: Path, known: Set[str]) -> Iterator[Problem]:
    node = tree.value
    for part in path:
        if isinstance(part, int):
            node = node[part]
        else:
            node = node.get(part) if isinstance(node, dict) else None
    for key in node if isinstance(node, dict) else ():
        if key not in known:
            here = (*path, key)
            yield unknown_key(join(*here), key, known, line=tree.line_of(here))


def _deployment_inside(tree: YamlTree, text: str) -> Iterable[Problem]:
    """Problems of the deployment, with lines of the whole file: its text is a block below its key."""
    base = ("spec", "serveConfigV2")
    above = tree.line_of(base) or 0
    inner = read_yaml(text)
    problems = [*inner.problems, *(check_tree(inner) if inner.value is not None else ())]
    for problem in problems:
        path = ": ".join(part for part in (join(*base), problem.path) if part)
        yield replace(problem, path=path, line=above + (problem.line or 1))
