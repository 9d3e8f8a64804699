"""Reading the config tree: unknown keys and mistyped values are refused by dotted path, values checked.

Every mistake is reported at once, as `cluster.config.problems.Problem`.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from cluster.config.leaves import children, leaf_problems, pattern_of
from cluster.config.pools import pool_problems
from cluster.config.problems import ConfigError, Problem, join, unknown_key
from cluster.config.tree import EMBEDDED_MODEL, TandemConfig
from cluster.config.yaml_tree import read_yaml
from workers.decoding.drafter import MODEL_METHODS

# Keys that look right but are written elsewhere, or that Tandem fills in.
_ELSEWHERE = {
    "pools.*.parallel.tensor_parallel": "it is pools.{}.tensor_parallel",
    "router.placement.policy": "it is router.policy",
    "router.http.model_name": "it is model.name",
    "router.http.replica": "Tandem sets it",
    "router.http.version": "Tandem sets it",
}


def parse_config(tree: Mapping[str, Any]) -> TandemConfig:
    """The typed tree, or a ConfigError with every mistake."""
    config, problems = check_config(tree)
    if config is None:
        raise ConfigError(problems)
    return config


def check_config(tree: object) -> tuple[TandemConfig | None, list[Problem]]:
    """The typed tree and no problems, or None and every problem."""
    if not isinstance(tree, Mapping):
        return None, [Problem(path="", message="the config is a mapping", got=type(tree).__name__)]
    if unusable := list(_not_finite(tree, ())):
        return None, unusable
    elsewhere = [_unknown(path, ()) for path in _paths(tree) if pattern_of(path) in _ELSEWHERE]
    try:
        # JSON mode: strict about scalars, and lists and mappings become tuples and dataclasses.
        config = TandemConfig.model_validate_json(json.dumps(_complete(tree), allow_nan=False))
    except ValidationError as error:
        return None, [_problem(tree, entry["type"], entry["loc"], entry["msg"]) for entry in error.errors()]
    except (TypeError, ValueError) as error:
        return None, [Problem(path="", message=f"not plain data: {error}")]
    problems = [*elsewhere, *_empty_pools(tree), *leaf_problems(config), *_cross_problems(config)]
    known = {problem.path for problem in problems}  # a value out of range need not fit others too
    problems += [problem for problem in pool_problems(config) if problem.path not in known]
    return (None, problems) if problems else (config, [])


def _not_finite(value: object, path: tuple[str | int, ...]) -> Iterable[Problem]:
    """Infinities and NaN anywhere: JSON has none, and no value of the tree means anything with one."""
    if isinstance(value, float) and not math.isfinite(value):
        yield Problem(path=join(*path), message="not a finite number", got=str(value))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _not_finite(item, (*path, key))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _not_finite(item, (*path, i))


def _complete(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """The tree with the leaves' fields that have no default, where the file leaves them out."""
    completed = {**tree}
    for path, value in {("model", "path"): EMBEDDED_MODEL, ("router", "http", "model_name"): ""}.items():
        node: Any = completed
        for key in path[:-1]:
            node[key] = dict(node[key]) if isinstance(node.get(key), Mapping) else node.get(key, {})
            node = node[key]
            if not isinstance(node, dict):
                break
        else:
            node.setdefault(path[-1], value)
    return completed


def _paths(tree: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterable[tuple[str, ...]]:
    """Every dotted path the file gives."""
    for key, value in tree.items():
        yield (*path, key)
        if isinstance(value, Mapping):
            yield from _paths(value, (*path, key))


def apply_overrides(tree: Mapping[str, Any], assignments: Iterable[str]) -> dict[str, Any]:
    """A copy of the tree with each `dotted.path=value` set; values are read as YAML.

    Paths that exist nowhere in the config are refused here, so that the error names the assignment.
    """
    changed: dict[str, Any] = copy.deepcopy(dict(tree))
    problems = []
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        keys = path.strip().split(".")
        if not equals or not all(keys):
            problems.append(Problem(path=path, message="not an assignment", got=repr(assignment),
                                    allowed="dotted.path=value"))  # fmt: skip
            continue
        if (unknown := _first_unknown(keys)) is not None:
            problems.append(unknown)
            continue
        value = read_yaml(text) if text.strip() else None
        if value is not None and value.problems:
            problems += [
                Problem(path=path, message=p.message, got=p.got, hint=p.hint) for p in value.problems
            ]
            continue
        node = changed
        for key in keys[:-1]:
            inner = node.get(key)
            node[key] = node = dict(inner) if isinstance(inner, Mapping) else {}
        node[keys[-1]] = value.value if value is not None else ""
    if problems:
        raise ConfigError(problems)
    return changed


def _first_unknown(keys: Sequence[str]) -> Problem | None:
    kind: Any = TandemConfig
    for depth, key in enumerate(keys):
        names = children(kind)
        if names is None:
            return Problem(path=join(*keys), message=f"{join(*keys[:depth])} is a value, it has no parts")
        if key not in names or pattern_of(keys[: depth + 1]) in _ELSEWHERE:
            return _unknown(keys[: depth + 1], names)
        kind = names[key]
    if children(kind) is not None:
        allowed = ", ".join(children(kind) or ())
        return Problem(path=join(*keys), message="names a part, not a value", allowed=allowed)
    return None


def _unknown(path: Sequence[str], allowed: Iterable[str]) -> Problem:
    pattern = pattern_of(path)
    if pattern in _ELSEWHERE:
        return Problem(path=join(*path), message="unknown key", hint=_ELSEWHERE[pattern].format(path[1]))
    return unknown_key(join(*path), path[-1], allowed)


def _problem(tree: Mapping[str, Any], kind: str, loc: tuple[int | str, ...], message: str) -> Problem:
    """One of pydantic's findings in our form."""
    path = [str(part) for part in loc]
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        node: Any = TandemConfig
        for key in path[:-1]:
            node = (children(node) or {}).get(key)
        return _unknown(path, children(node) or ())
    value: Any = tree
    for part in path:
        if isinstance(value, list) and part.isdigit():
            value = dict(enumerate(value)).get(int(part))
        else:
            value = value.get(part) if isinstance(value, Mapping) else None
    if kind in ("missing", "missing_argument"):
        return Problem(path=join(*path), message="must be given")
    allowed = ""
    if kind in ("literal_error", "enum"):
        message, allowed = (
            "not one of the choices",
            message.removeprefix("Input should be ").replace(" or ", ", "),
        )
    elif message.startswith("Input should be "):
        message, allowed = "wrong type", message.removeprefix("Input should be ")
    hint = "in YAML and --set, text that looks like a number or a word like true needs quotes" if (
        kind == "string_type" and isinstance(value, bool | int | float)) else ""  # fmt: skip
    return Problem(path=join(*path), message=message, got=repr(value), allowed=allowed, hint=hint)


def _empty_pools(tree: Mapping[str, Any]) -> Iterable[Problem]:
    """A pool without a single key is null in YAML, which would read as no such pool."""
    pools = tree.get("pools")
    for name, pool in pools.items() if isinstance(pools, Mapping) else ():
        if pool is None:
            hint = "write {} for a pool with all defaults"
            yield Problem(path=join("pools", name), message="the pool is empty", got="null", hint=hint)


def _cross_problems(config: TandemConfig) -> Iterable[Problem]:
    """Values that are legal alone but not together."""
    if not config.model.path:
        yield Problem(path="model.path", message="is empty", hint=f"give a folder, or {EMBEDDED_MODEL}")
    for name, pool in config.pools.by_name().items():
        speculative = pool.speculative
        if (speculative.method in MODEL_METHODS) != bool(speculative.model):
            yield Problem(
                path=f"pools.{name}.speculative.model",
                message=f"does not go with the method {speculative.method}",
                got=repr(speculative.model),
                hint=f"the folder that {' and '.join(MODEL_METHODS)} need; other methods have none",
            )
        length, cache = config.model.max_model_len, pool.cache
        if (
            length is not None
            and cache.num_blocks is not None
            and cache.num_blocks * cache.block_size < length
        ):
            yield Problem(
                path=f"pools.{name}.cache.num_blocks",
                message=f"the pool is too small for one request of model.max_model_len {length}",
                got=str(cache.num_blocks),
                allowed=f"at least {-(-length // cache.block_size)}",
            )
