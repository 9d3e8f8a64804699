"""Deployment files: every mistake at once, each with its line.

A file is a Serve config, checked by Ray's schema (`cluster.deployment.serve_schema`) and by what Tandem asks
on top: a port that strangers cannot reach, the config tree in `args`, deployments that fit its pools.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path as FilePath
from typing import Any

from cluster.config.parse import check_config
from cluster.config.pools import deployment_problems
from cluster.config.problems import Problem, join, parts_of, unknown_key
from cluster.config.yaml_tree import MAX_BYTES, Path, YamlTree, read_yaml
from cluster.deployment.scaling_checks import scaling_problems
from cluster.deployment.serve_schema import is_count, schema_problems
from workers.regular_file import open_regular

IMPORT_PATH = "cluster.app:build"
ROUTER_DEPLOYMENT = "router"
_LOOPBACK_6 = "::1"
_LOOPBACK = {"127.0.0.1", "localhost", _LOOPBACK_6}
_MOST_NAME_CHARS = 100
_PREFIX = re.compile(r"/|(/[A-Za-z0-9._~%@:+=-]+)+/?")  # as it stands in addresses
# How names of variables end that Serve reads as numbers, while its controller starts.
_NUMBERS = ("_S", "_MS")
_MAY_BE_EMPTY = ("RAY_SERVE_HAPROXY_TIMEOUT_SERVER_S",)
# Written by `build` from the config tree; a value in the file would fight with it.
_COMPUTED = {
    "placement_group_bundles": "computed from pools.<pool>.tensor_parallel",
    "placement_group_strategy": "set with pools.<pool>.placement in args",
    "request_router_config": "set with router.policy in args",
    "user_config": "what a deployment is told stands in args",
}


def check_file(file: str | FilePath, *, allow_open: bool = False) -> tuple[Any, list[Problem]]:
    """The tree of a deployment file and every problem in it; the tree is None when it could not be read.

    `allow_open` accepts an HTTP host that other machines can reach.
    """
    tree = read_file(file)
    return tree.value, check_read(tree, str(file), allow_open=allow_open)


def check_read(tree: YamlTree, file: str, *, allow_open: bool = False) -> list[Problem]:
    """Every problem of a deployment file that was read, in the order of its lines."""
    problems = list(tree.problems)
    if tree.value is not None:
        refused = {problem.path for problem in tree.problems}  # their values are missing from the tree
        found = check_tree(tree, allow_open=allow_open)
        problems += [problem for problem in found if problem.path not in refused]
    problems.sort(key=lambda problem: problem.line or 0)
    return [replace(problem, file=file) for problem in problems]


def read_file(file: str | FilePath) -> YamlTree:
    """What a YAML file says; why it cannot be read, as a pipe or a device, is in the tree's problems."""
    try:
        with open_regular(FilePath(file)) as stream:
            tree = read_yaml(stream.read(MAX_BYTES + 1))  # one too many is refused
    except OSError as error:
        is_folder = FilePath(file).is_dir()
        why = "it is a folder" if is_folder else error.strerror
        hint = f"a model's folder is given by `--set model.path={file}`" if is_folder else ""
        return YamlTree(problems=[Problem(path="", message=f"cannot be read: {why}", hint=hint)])
    if tree.value is None and not tree.problems:
        tree.problems.append(Problem(path="", message="the file is empty"))
    return tree


def check_tree(tree: YamlTree, *, allow_open: bool = False) -> list[Problem]:
    """Problems of a tree that was read: unknown keys, mistyped values, and what Tandem asks on top."""
    if not isinstance(tree.value, dict):
        return [Problem(path="", message="a deployment file is a mapping", got=type(tree.value).__name__)]
    problems = schema_problems(tree)
    problems += _proxy_problems(tree, allow_open=allow_open)
    problems += _variable_problems(tree)
    applications = tree.value.get("applications")
    if isinstance(applications, list):
        ours = [i for i, app in enumerate(applications) if is_ours(app)]
        for i in ours:
            problems += _application_problems(tree, i)
        if not ours and not problems:
            hint = f"write import_path: {IMPORT_PATH}"
            problems.append(tree.problem(("applications",), "no application of Tandem", hint=hint))
    return problems


def is_ours(app: Any) -> bool:
    """Whether an entry of `applications` is one of Tandem."""
    return isinstance(app, dict) and str(app.get("import_path")) == IMPORT_PATH


def _proxy_problems(tree: YamlTree, *, allow_open: bool) -> Iterator[Problem]:
    """What would leave the HTTP port closed, open to strangers, or not to be had."""
    if tree.value.get("proxy_location") == "Disabled":
        yield tree.problem(
            ("proxy_location",),
            "nothing would listen on the HTTP port",
            got="'Disabled'",
            allowed="HeadOnly, EveryNode",
        )
    options = tree.value.get("http_options")
    options = options if isinstance(options, dict) else {}
    host, port = options.get("host", "0.0.0.0"), options.get("port", 8000)
    is_open = isinstance(host, str) and host not in _LOOPBACK
    if host == _LOOPBACK_6:  # replicas would listen there alone, too
        yield tree.problem(
            ("http_options", "host"),
            "Serve's ingress would not reach the routers, which it asks at an address of version 4",
            got=repr(host),
            allowed="127.0.0.1",
        )
    if is_open and not allow_open and not _all_ask_for_keys(tree.value):
        yield tree.problem(
            ("http_options", "host"),
            "the HTTP port would be open to other machines",
            got=repr(host) if "host" in options else "no host, which means 0.0.0.0",
            allowed="127.0.0.1",
            hint="set router.http.api_keys_file, or pass --i-know-this-is-open if a firewall or an "
            "authenticating proxy stands before it",
        )
    grpc = grpc_port(tree.value)
    for path, given in ((("http_options", "port"), port), (("grpc_options", "port"), grpc)):
        if is_count(given) and not 1024 <= given <= 65535:
            yield tree.problem(path, "port out of range", got=str(given)[:100], allowed="1024 to 65535")
    if is_count(port) and port == grpc:
        hint = "http_options.port is the same"
        yield tree.problem(("grpc_options", "port"), "the port is given twice", got=str(port), hint=hint)


def _variable_problems(tree: YamlTree) -> Iterator[Problem]:
    """Serve's own variables with which its controller would end when it starts."""
    path: Path = ("controller_options", "runtime_env", "env_vars")
    variables = tree.value
    for part in path:
        variables = variables.get(part) if isinstance(variables, dict) else None
    for name, text in variables.items() if isinstance(variables, dict) else ():
        if not isinstance(text, str) or not name.startswith("RAY_SERVE_") or name.endswith("_BUCKETS_MS"):
            continue
        if name.endswith(_NUMBERS) and not _is_number(text) and not (name in _MAY_BE_EMPTY and not text):
            yield tree.problem((*path, name), "not a number", got=repr(text)[:100])


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _all_ask_for_keys(tree: dict[str, Any]) -> bool:
    """Whether every application is ours and has a file of API keys, without which nobody may call."""
    applications = tree.get("applications")
    applications = applications if isinstance(applications, list) else []
    return bool(applications) and all(is_ours(app) and _key_file(app.get("args")) for app in applications)


def _key_file(args: Any) -> str:
    """The file of API keys that a config names, as far as it can be read; empty: none."""
    router = args.get("router") if isinstance(args, dict) else None
    http = router.get("http") if isinstance(router, dict) else None
    file = http.get("api_keys_file") if isinstance(http, dict) else None
    return file if isinstance(file, str) else ""


def grpc_port(tree: dict[str, Any]) -> int | None:
    """The port of gRPC when a deployment file has options for it."""
    options = tree.get("grpc_options")
    port = options.get("port", 9000) if isinstance(options, dict) else None
    return port if is_count(port) else None


def _pool_names(args: Any) -> Sequence[str]:
    """The pools that a config with mistakes names."""
    pools = args.get("pools") if isinstance(args, dict) else None
    return list(pools) if isinstance(pools, dict) and pools else ["unified"]


def in_args(problem: Problem, tree: YamlTree, index: int) -> Problem:
    """A problem of a config, where that stands in the file: in `args` of the application of a position."""
    path: Path = ("applications", index, "args", *(parts_of(problem.path) if problem.path else ()))
    return replace(problem, path=join(*path), line=tree.line_of(path))


def _application_problems(tree: YamlTree, index: int) -> Iterator[Problem]:
    base: Path = ("applications", index)
    app = tree.value["applications"][index]
    args = app.get("args") or {}
    name = app.get("name", "")
    if isinstance(name, str) and (len(name) > _MOST_NAME_CHARS or "#" in name or not name.isprintable()):
        yield tree.problem(
            (*base, "name"),
            "not usable as a name",  # Serve's ids of replicas are split at "#"
            got=repr(name)[:_MOST_NAME_CHARS],
            allowed=f"at most {_MOST_NAME_CHARS} characters, without # and control characters",
        )
    prefix = app.get("route_prefix", "/")
    if prefix is None or (isinstance(prefix, str) and not _PREFIX.fullmatch(prefix)):
        hint = "leave it out, or write / or /name"
        yield tree.problem((*base, "route_prefix"), "not a path", got=repr(prefix)[:100], hint=hint)
    config, problems = check_config(args)
    for problem in problems:
        yield in_args(problem, tree, index)
    deployments = app.get("deployments")
    deployments = deployments if isinstance(deployments, list) else []
    if config is not None:
        for problem in deployment_problems(config, deployments):
            yield in_args(problem, tree, index)
        for problem in scaling_problems(app, config, ROUTER_DEPLOYMENT):
            path = (*base, *parts_of(problem.path))
            yield replace(problem, path=join(*path), line=tree.line_of(path))
    names: Sequence[str] = [ROUTER_DEPLOYMENT, *(config.pools.by_name() if config else _pool_names(args))]
    seen: dict[str, int] = {}
    for i, deployment in enumerate(deployments):
        if not isinstance(deployment, dict) or not isinstance(deployment.get("name"), str):
            continue
        here, name = (*base, "deployments", i), deployment["name"]
        if name not in names:
            yield unknown_key(join(*here, "name"), name, names, line=tree.line_of((*here, "name")))
        if name in seen:
            hint = f"first on line {tree.line_of((*base, 'deployments', seen[name]))}"
            yield tree.problem((*here, "name"), "the deployment is given twice", got=repr(name), hint=hint)
        seen.setdefault(name, i)
        for key, reason in _COMPUTED.items():
            if key in deployment:
                yield tree.problem((*here, key), "set by Tandem, not in the file", hint=reason)
