"""Ray's schema of a Serve config (v2), strictly.

Ray drops unknown keys without a word, so a misspelt `num_replicas` deploys something else than was written.
This check walks Ray's own pydantic models, so it knows exactly the keys that this Ray knows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import UnionType
from typing import Any, TypeGuard, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from ray.serve.schema import ServeDeploySchema

from cluster.config.leaves import Range
from cluster.config.problems import Problem, join, unknown_key
from cluster.config.yaml_tree import Path, YamlTree

_RAY_RANGES = {"_replicas": Range(0, 1024), "_s": Range(0, 7 * 86_400), "_requests": Range(-1, 1_000_000)}
_NO_REPLICAS = (
    "Serve takes 1 or more; leave this entry and its pool out, or let Serve stop idle replicas: "
    "autoscaling_config: {min_replicas: 0, max_replicas: 1} instead"
)
_NOT_RAYS = {"args", "user_config", "runtime_env", "env_vars"}


def schema_problems(tree: YamlTree) -> list[Problem]:
    """Unknown keys, mistyped values, and numbers that only a mistake can be; one entry a place."""
    problems = list(_misshapen(tree.value, ServeDeploySchema, (), tree))
    for find in (_mistyped(ServeDeploySchema, tree.value, (), tree), _out_of_range(tree.value, (), tree)):
        known = {problem.path for problem in problems}
        problems += [problem for problem in find if problem.path not in known]
    return problems


def is_count(value: Any) -> TypeGuard[int]:
    """Whether it is a whole number; true and false are not."""
    return isinstance(value, int) and not isinstance(value, bool)


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
    if path and path[-1] == "num_replicas" and value == 0 and is_count(value):
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
