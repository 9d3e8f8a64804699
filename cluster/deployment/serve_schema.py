"""Strict check of a Ray Serve config (schema v2).

Ray drops unknown keys without a word, so a misspelt `num_replicas` deploys something else than was
written. This check walks Ray's own pydantic models, so it knows exactly the keys that this Ray knows, and
reports every mistake of the file at once with its line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path as FilePath
from types import UnionType
from typing import Any, TypeGuard, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from ray.serve.schema import ServeDeploySchema

from cluster.config.leaves import Range
from cluster.config.parse import check_config
from cluster.config.pools import deployment_problems
from cluster.config.problems import Problem, join, parts_of, unknown_key
from cluster.config.yaml_tree import MAX_BYTES, Path, YamlTree, read_yaml
from cluster.deployment.scaling_checks import scaling_problems

IMPORT_PATH = "cluster.app:build"
ROUTER_DEPLOYMENT = "router"
_LOOPBACK = {"127.0.0.1", "localhost", "::1"}
# Written by `build` from the config tree; a value in the file would fight with it.
_COMPUTED = {
    "placement_group_bundles": "computed from pools.<pool>.tensor_parallel",
    "request_router_config": "set with router.policy in args",
}
_RAY_RANGES = {"_replicas": Range(0, 1024), "_s": Range(0, 7 * 86_400), "_requests": Range(-1, 1_000_000)}
_NO_REPLICAS = (
    "Serve takes 1 or more; leave this entry and its pool out, or let Serve stop idle replicas: "
    "autoscaling_config: {min_replicas: 0, max_replicas: 1} instead"
)
_NOT_RAYS = {"args", "user_config", "runtime_env", "env_vars"}


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
    """What a YAML file says; why it cannot be read is in the tree's problems."""
    try:
        with FilePath(file).open("rb") as stream:
            tree = read_yaml(stream.read(MAX_BYTES + 1))  # one too many is refused
    except OSError as error:
        return YamlTree(problems=[Problem(path="", message=f"cannot be read: {error.strerror}")])
    if tree.value is None and not tree.problems:
        tree.problems.append(Problem(path="", message="the file is empty"))
    return tree


def check_tree(tree: YamlTree, *, allow_open: bool = False) -> list[Problem]:
    """Problems of a tree that was read: unknown keys, mistyped values, and what Tandem asks on top."""
    if not isinstance(tree.value, dict):
        return [Problem(path="", message="a deployment file is a mapping", got=type(tree.value).__name__)]
    problems = list(_misshapen(tree.value, ServeDeploySchema, (), tree))
    for find in (_mistyped(ServeDeploySchema, tree.value, (), tree), _out_of_range(tree.value, (), tree)):
        known = {problem.path for problem in problems}
        problems += [problem for problem in find if problem.path not in known]
    problems += _proxy_problems(tree, allow_open=allow_open)
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


def _misshapen(value: Any, model: type[BaseModel], path: Path, tree: YamlTree) -> Iterator[Problem]:
    """Keys that no field of the model reads, and list entries that are no mappings, at every level below
    too."""
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
                if not isinstance(entry, dict):
                    yield tree.problem((*here, i), "an entry is a mapping", got=_shown(entry))
                yield from _misshapen(entry, inner, (*here, i), tree)
        elif not is_list:
            yield from _misshapen(item, inner, here, tree)
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
    """What Ray's own validation says, in our form; one entry a place. Strict: alone it would take "8000",
    8000.0 or true for a number, and other readers of the file would not."""
    try:
        model.model_validate_json(json.dumps(value), strict=True)
    except (AttributeError, LookupError, TypeError) as error:  # it looks into parts of any shape
        if any(_misshapen(value, model, base, tree)):
            return []  # said there
        return [tree.problem(base, f"Ray cannot read this part: {type(error).__name__}: {error}")]
    except ValidationError as error:
        found: dict[str, Problem] = {}
        for entry in error.errors():
            if entry["type"] == "extra_forbidden":  # found by `_misshapen`, with a suggestion
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
    if path and path[-1] == "num_replicas" and value == 0 and _is_count(value):
        return tree.problem(path, "a deployment of no replicas", got="0", hint=_NO_REPLICAS)
    message = entry["msg"].removeprefix("Value error, ").rstrip(".")
    got = "" if isinstance(value, dict | list) or entry["type"] == "missing" else _shown(value)
    return tree.problem(path, message[:1].lower() + message[1:], got=got)


def _has(value: Any, part: str | int) -> bool:
    """Whether a mapping has the key, or a list the position."""
    if isinstance(value, dict):
        return part in value
    return isinstance(value, list) and isinstance(part, int) and part < len(value)


def _shown(value: Any) -> str:
    """A value as the file has it, cut when long."""
    return "null" if value is None else repr(value)[:100]


def _out_of_range(value: Any, path: Path, tree: YamlTree) -> Iterator[Problem]:
    """Numbers of Ray's part that only a mistake can be, by the ending of their name; Ray itself has no upper
    limits and few lower ones."""
    if isinstance(value, dict):
        for key, item in value.items():
            if key not in _NOT_RAYS:
                yield from _out_of_range(item, (*path, key), tree)
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _out_of_range(item, (*path, i), tree)
    elif isinstance(value, int | float) and not isinstance(value, bool) and path:
        name = str(path[-1])
        limits = next((limits for end, limits in _RAY_RANGES.items() if name.endswith(end)), None)
        if limits is not None and not limits.allows(value):
            yield tree.problem(path, "out of range", got=str(value)[:100], allowed=str(limits))


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
        if _is_count(given) and not 1024 <= given <= 65535:
            yield tree.problem(path, "port out of range", got=str(given)[:100], allowed="1024 to 65535")
    if _is_count(port) and port == grpc:
        hint = "http_options.port is the same"
        yield tree.problem(("grpc_options", "port"), "the port is given twice", got=str(port), hint=hint)


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


def _is_count(value: Any) -> TypeGuard[int]:
    """Whether it is a whole number; true and false are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def grpc_port(tree: dict[str, Any]) -> int | None:
    """The port of gRPC when a deployment file has options for it."""
    options = tree.get("grpc_options")
    port = options.get("port", 9000) if isinstance(options, dict) else None
    return port if _is_count(port) else None


def _pool_names(args: Any) -> Sequence[str]:
    """The pools that a config with mistakes names."""
    pools = args.get("pools") if isinstance(args, dict) else None
    return list(pools) if isinstance(pools, dict) and pools else ["unified"]


def in_args(problem: Problem, tree: YamlTree, index: int) -> Problem:
    """A problem of a config, where that stands in the file: in `args` of the application of a position."""
    path: Path = ("applications", index, "args", *problem.path.split("."))
    return replace(problem, path=join(*path), line=tree.line_of(path))


def _application_problems(tree: YamlTree, index: int) -> Iterator[Problem]:
    base: Path = ("applications", index)
    app = tree.value["applications"][index]
    args = app.get("args") or {}
    prefix = app.get("route_prefix", "/")
    if prefix is None or (isinstance(prefix, str) and not prefix.startswith("/")):
        hint = "leave it out, or write / or /name"
        yield tree.problem((*base, "route_prefix"), "not a path", got=repr(prefix), hint=hint)
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
