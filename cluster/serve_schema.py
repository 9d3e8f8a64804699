"""Strict check of a Ray Serve config (schema v2).

Ray drops unknown keys without a word, so a misspelt `num_replicas` deploys something else than was
written. This check walks Ray's own pydantic models, so it knows exactly the keys that this Ray knows, and
reports every mistake of the file at once with its line.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path as FilePath
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from ray.serve.schema import ServeDeploySchema

from cluster.config import check_config
from cluster.pools import deployment_problems
from cluster.problems import Problem, join, unknown_key
from cluster.yaml_tree import Path, YamlTree, read_yaml

IMPORT_PATH = "cluster.app:build"
ROUTER_DEPLOYMENT = "router"
_LOOPBACK = {"127.0.0.1", "localhost", "::1"}
# Written by `build` from the config tree; a value in the file would fight with it.
_COMPUTED = {
    "placement_group_bundles": "computed from pools.<pool>.tensor_parallel",
    "request_router_config": "set with router.policy in args",
}


def check_file(file: str | FilePath, *, allow_open: bool = False) -> tuple[Any, list[Problem]]:
    """The tree of a deployment file and every problem in it; the tree is None when it could not be read.

    `allow_open` accepts an HTTP host that other machines can reach.
    """
    name = str(file)
    try:
        text = FilePath(file).read_bytes()
    except OSError as error:
        return None, [Problem(path="", message=f"cannot be read: {error.strerror}", file=name)]
    tree = read_yaml(text)
    problems = list(tree.problems)
    if tree.value is not None:
        refused = {problem.path for problem in tree.problems}  # their values are missing from the tree
        found = check_tree(tree, allow_open=allow_open)
        problems += [problem for problem in found if problem.path not in refused]
    return tree.value, [
        replace(problem, file=name) for problem in sorted(problems, key=lambda p: p.line or 0)
    ]


def check_tree(tree: YamlTree, *, allow_open: bool = False) -> list[Problem]:
    """Problems of a tree that was read: unknown keys, mistyped values, and what Tandem asks on top."""
    if not isinstance(tree.value, dict):
        return [Problem(path="", message="a deployment file is a mapping", got=type(tree.value).__name__)]
    problems = list(_unknown_keys(tree.value, ServeDeploySchema, (), tree))
    problems += _mistyped(ServeDeploySchema, tree.value, (), tree)
    problems += _http_problems(tree, allow_open=allow_open)
    applications = tree.value.get("applications")
    if isinstance(applications, list):
        ours = [i for i, app in enumerate(applications) if _is_ours(app)]
        for i in ours:
            problems += _application_problems(tree, i)
        if not ours and not problems:
            hint = f"write import_path: {IMPORT_PATH}"
            problems.append(_problem(tree, ("applications",), "no application of Tandem", hint=hint))
    return problems


def _problem(
    tree: YamlTree, path: Path, message: str, *, got: str = "", allowed: str = "", hint: str = ""
) -> Problem:
    line = tree.line_of(path)
    return Problem(path=join(*path), message=message, got=got, allowed=allowed, hint=hint, line=line)


def _is_ours(app: Any) -> bool:
    return isinstance(app, dict) and str(app.get("import_path")) == IMPORT_PATH


def _unknown_keys(value: Any, model: type[BaseModel], path: Path, tree: YamlTree) -> Iterator[Problem]:
    """Keys that no field of the model reads, at every level below too."""
    if not isinstance(value, dict):
        return
    names = set(model.model_fields)
    for key, item in value.items():
        here = (*path, key)
        if key not in names:
            yield unknown_key(join(*here), key, names, line=tree.line_of(here))
            continue
        inner, is_list = _inner_model(model.model_fields[key].annotation)
        if inner is None:
            continue
        if is_list and isinstance(item, list):
            for i, entry in enumerate(item):
                yield from _unknown_keys(entry, inner, (*here, i), tree)
        elif not is_list:
            yield from _unknown_keys(item, inner, here, tree)
            if isinstance(item, dict) and _takes_any_mapping(model.model_fields[key].annotation):
                yield from _mistyped(inner, item, here, tree)


def _inner_model(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """The pydantic model inside a field's annotation, and whether the field is a list of it."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    origin = get_origin(annotation)
    if origin in (Union, UnionType):
        for option in get_args(annotation):
            model, is_list = _inner_model(option)
            if model is not None:
                return model, is_list
    elif origin is list:
        model, _ = _inner_model(get_args(annotation)[0])
        return model, model is not None
    return None, False


def _takes_any_mapping(annotation: Any) -> bool:
    """Whether the field takes a mapping or the model: Ray then checks the model only when it runs."""
    options = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else ()
    return any(option is dict or get_origin(option) is dict for option in options)


def _mistyped(model: type[BaseModel], value: Any, base: Path, tree: YamlTree) -> list[Problem]:
    """What Ray's own validation says, in our form; one entry a place."""
    try:
        model.model_validate(copy.deepcopy(value))  # some validators change their input
    except ValidationError as error:
        found: dict[str, Problem] = {}
        for entry in error.errors():
            if entry["type"] == "extra_forbidden":  # found by `_unknown_keys`, with a suggestion
                continue
            problem = _from_pydantic(dict(entry), value, base, tree)
            found.setdefault(problem.path, problem)
        return list(found.values())
    return []


def _from_pydantic(entry: dict[str, Any], value: Any, base: Path, tree: YamlTree) -> Problem:
    path = base
    for part in entry["loc"]:  # pydantic adds names of union branches: follow only what the file has
        if _has(value, part):
            value = value[part]
        elif entry["type"] == "missing" and part == entry["loc"][-1]:
            value = None
        else:
            break
        path = (*path, part)
    message = entry["msg"].removeprefix("Value error, ").rstrip(".")
    got = "" if isinstance(value, dict | list) or entry["type"] == "missing" else repr(value)
    return _problem(tree, path, message[:1].lower() + message[1:], got=got)


def _has(value: Any, part: str | int) -> bool:
    """Whether a mapping has the key, or a list the position."""
    if isinstance(value, dict):
        return part in value
    return isinstance(value, list) and isinstance(part, int) and part < len(value)


def _http_problems(tree: YamlTree, *, allow_open: bool) -> Iterator[Problem]:
    options = tree.value.get("http_options")
    options = options if isinstance(options, dict) else {}
    host, port = options.get("host", "0.0.0.0"), options.get("port", 8000)
    if isinstance(host, str) and host not in _LOOPBACK and not allow_open:
        yield _problem(
            tree,
            ("http_options", "host"),
            "the HTTP port would be open to other machines",
            got=repr(host) if "host" in options else "no host, which means 0.0.0.0",
            allowed="127.0.0.1",
            hint="pass --i-know-this-is-open if a firewall or an authenticating proxy stands before it",
        )
    if isinstance(port, int) and not 1024 <= port <= 65535:
        yield _problem(
            tree, ("http_options", "port"), "port out of range", got=str(port), allowed="1024 to 65535"
        )
    if port == grpc_port(tree.value):
        hint = "http_options.port is the same"
        yield _problem(tree, ("grpc_options", "port"), "the port is given twice", got=str(port), hint=hint)


def grpc_port(tree: dict[str, Any]) -> int | None:
    """The port of gRPC when a deployment file has options for it."""
    options = tree.get("grpc_options")
    port = options.get("port", 9000) if isinstance(options, dict) else None
    return port if isinstance(port, int) else None


def _pool_names(args: Any) -> Sequence[str]:
    """The pools that a config with mistakes names."""
    pools = args.get("pools") if isinstance(args, dict) else None
    return list(pools) if isinstance(pools, dict) and pools else ["unified"]


def _application_problems(tree: YamlTree, index: int) -> Iterator[Problem]:
    base: Path = ("applications", index)
    app = tree.value["applications"][index]
    args = app.get("args") or {}
    config, problems = check_config(args)
    for problem in problems:
        path = (*base, "args", *problem.path.split("."))
        yield replace(problem, path=join(*path), line=tree.line_of(path))
    deployments = app.get("deployments")
    deployments = deployments if isinstance(deployments, list) else []
    if config is not None:
        for problem in deployment_problems(config, deployments):
            path = (*base, "args", *problem.path.split("."))
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
            yield _problem(tree, (*here, "name"), "the deployment is given twice", got=repr(name), hint=hint)
        seen.setdefault(name, i)
        for key, reason in _COMPUTED.items():
            if key in deployment:
                yield _problem(tree, (*here, key), "set by Tandem, not in the file", hint=reason)
