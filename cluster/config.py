"""Reading the config tree: unknown keys and mistyped values are refused by dotted path, ranges checked.

Every mistake is reported at once, as `cluster.problems.Problem`.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel, ValidationError

from cluster.config_tree import EMBEDDED_MODEL, PoolConfig, TandemConfig
from cluster.pools import pool_problems
from cluster.problems import ConfigError, Problem, join, unknown_key
from cluster.yaml_tree import read_yaml

__all__ = ["EMBEDDED_MODEL", "PoolConfig", "TandemConfig", "apply_overrides", "check_config", "parse_config"]


class _Range(NamedTuple):
    """Legal values of a number. None: no limit on that side, or (as a value) always legal."""

    least: float | None = None
    most: float | None = None
    above: float | None = None  # exclusive lower limit

    def allows(self, value: float) -> bool:
        return not (
            (self.least is not None and value < self.least)
            or (self.most is not None and value > self.most)
            or (self.above is not None and value <= self.above)
        )

    def __str__(self) -> str:
        low = f"above {self.above:g}" if self.above is not None else f"at least {self.least:g}"
        return f"{low}, at most {self.most:g}" if self.most is not None else low


_POSITIVE = _Range(above=0)
_RANGES: dict[str, _Range] = {
    "model.max_model_len": _Range(least=1),
    "pools.*.tensor_parallel": _Range(least=1, most=1024),
    "pools.*.cpus_per_rank": _Range(least=0),
    "pools.*.gpus_per_rank": _Range(least=0),
    "pools.*.start_timeout_s": _POSITIVE,
    "pools.*.drain_timeout_s": _Range(least=0),
    "pools.*.cache.block_size": _Range(least=1, most=1024),
    "pools.*.cache.num_blocks": _Range(least=1),
    "pools.*.cache.memory_fraction": _Range(above=0, most=1),
    "pools.*.cache.max_bytes": _POSITIVE,
    "pools.*.schedule.max_step_tokens": _Range(least=1),
    "pools.*.schedule.max_running": _Range(least=1),
    "pools.*.schedule.max_prefill_chunk": _Range(least=1),
    "pools.*.schedule.max_waiting": _Range(least=0),
    "pools.*.parallel.step_timeout_s": _POSITIVE,
    "pools.*.parallel.threads_per_rank": _Range(least=1),
}
_CHOICES: dict[str, tuple[str, ...]] = {
    "model.dtype": ("auto", "bfloat16", "float32"),
    "model.quantization": ("none", "int8", "int4"),
}
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
    elsewhere = [_unknown(path, ()) for path in _paths(tree) if _pattern(path) in _ELSEWHERE]
    try:
        # JSON mode: strict about scalars, and lists and mappings become tuples and dataclasses.
        config = TandemConfig.model_validate_json(json.dumps(_complete(tree), allow_nan=False))
    except ValidationError as error:
        return None, [_problem(tree, entry["type"], entry["loc"], entry["msg"]) for entry in error.errors()]
    except (TypeError, ValueError) as error:
        return None, [Problem(path="", message=f"not plain data: {error}")]
    problems = [*elsewhere, *_empty_pools(tree), *_range_problems(config), *_cross_problems(config)]
    problems += pool_problems(config)
    return (None, problems) if problems else (config, [])


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


def _children(kind: Any) -> dict[str, Any] | None:
    """Names and types of the fields of a node of the tree; None for a leaf value."""
    if isinstance(kind, UnionType):  # a part that may be left out
        kind = next((option for option in get_args(kind) if option is not NoneType), kind)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return {name: info.annotation for name, info in kind.model_fields.items()}
    if isinstance(kind, type) and is_dataclass(kind):
        return {field.name: field.type for field in fields(kind)}
    return None


def _first_unknown(keys: Sequence[str]) -> Problem | None:
    kind: Any = TandemConfig
    for depth, key in enumerate(keys):
        children = _children(kind)
        if children is None:
            return Problem(path=join(*keys), message=f"{join(*keys[:depth])} is a value, it has no parts")
        if key not in children or _pattern(keys[: depth + 1]) in _ELSEWHERE:
            return _unknown(keys[: depth + 1], children)
        kind = children[key]
    if _children(kind) is not None:
        allowed = ", ".join(_children(kind) or ())
        return Problem(path=join(*keys), message="names a part, not a value", allowed=allowed)
    return None


def _unknown(path: Sequence[str], allowed: Iterable[str]) -> Problem:
    pattern = _pattern(path)
    if pattern in _ELSEWHERE:
        return Problem(path=join(*path), message="unknown key", hint=_ELSEWHERE[pattern].format(path[1]))
    return unknown_key(join(*path), path[-1], allowed)


def _problem(tree: Mapping[str, Any], kind: str, loc: tuple[int | str, ...], message: str) -> Problem:
    """One of pydantic's findings in our form."""
    path = [str(part) for part in loc]
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        node: Any = TandemConfig
        for key in path[:-1]:
            node = (_children(node) or {}).get(key)
        return _unknown(path, _children(node) or ())
    value: Any = tree
    for part in path:
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


def _pattern(path: Sequence[str]) -> str:
    """The path with the pool's name replaced by `*`."""
    return ".".join("*" if i == 1 and path[0] == "pools" else part for i, part in enumerate(path))


def _values(node: Any, path: tuple[str, ...] = ()) -> Iterable[tuple[tuple[str, ...], Any]]:
    """Every leaf value of the tree with its path."""
    children = _children(type(node))
    if children is None:
        yield path, node
        return
    for name in children:
        yield from _values(getattr(node, name), (*path, name))


def _range_problems(config: TandemConfig) -> Iterable[Problem]:
    for path, value in _values(config):
        pattern = _pattern(path)
        limits = _RANGES.get(pattern)
        if limits is not None and value is not None and not limits.allows(value):
            yield Problem(path=join(*path), message="out of range", got=str(value), allowed=str(limits))
        choices = _CHOICES.get(pattern)
        if choices is not None and value not in choices:
            allowed = ", ".join(choices)
            yield Problem(
                path=join(*path), message="not one of the choices", got=repr(value), allowed=allowed
            )


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
