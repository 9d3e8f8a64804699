"""YAML files written by people, read strictly: a plain tree with the line of every key.

Refused, with the line: files above 1 MB, tags (`!!python/object` and all others), duplicate keys, keys that
are not text, alias bombs and loops, nesting above 64, more than one document, infinities and NaN, and plain
words that YAML readers do not agree on (`on`, `no`, `010`, `1:30`, dates): the same file must mean the same
to Ray, which reads YAML 1.1, and to the person who wrote it.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from cluster.config.problems import Problem, join

MAX_BYTES = 1 << 20
MAX_DEPTH = 64
MAX_NODES = 20_000  # after aliases are followed

Path = tuple[str | int, ...]

_PLAIN_TAGS = {f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null", "map", "seq")}
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_AMBIGUOUS = (
    (re.compile(r"(?i:yes|no|on|off|y|n)\Z"), "write true or false, or quote it"),
    (re.compile(r"[-+]?0[0-9_]+\Z|[-+]?0[bBoOxX][0-9a-fA-F_]+\Z"), "write a decimal number, or quote it"),
    (re.compile(r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?\Z"), "quote it"),
    (re.compile(r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}([Tt ].*)?\Z"), "quote it"),
    (re.compile(r"[-+]?[0-9][0-9]*(_[0-9_]*)+\Z"), "write the number without underscores"),
    (
        re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][0-9]+\Z|[-+]?[0-9]+[eE][-+]?[0-9]+\Z"),
        "write it with a point and a sign, as 1.0e+5, or without exponent",
    ),
)


@dataclass(slots=True)
class YamlTree:
    """What a file says. `value` is None when it could not be read at all; `problems` then says why."""

    value: Any = None
    lines: dict[Path, int] = field(default_factory=dict)  # path -> 1-based line of its key or item
    problems: list[Problem] = field(default_factory=list)

    def line_of(self, path: Path) -> int | None:
        """Line of a path, or of the nearest thing around it that is in the file."""
        for end in range(len(path), -1, -1):
            if path[:end] in self.lines:
                return self.lines[path[:end]]
        return None

    def problem(
        self, path: Path, message: str, *, got: str = "", allowed: str = "", hint: str = ""
    ) -> Problem:
        """What is wrong at a path, with its line."""
        return Problem(
            path=join(*path), message=message, got=got, allowed=allowed, hint=hint, line=self.line_of(path)
        )


def read_yaml(text: str | bytes) -> YamlTree:
    """Tree of one YAML document. Never raises for what the text contains."""
    tree = YamlTree()
    if len(text) > MAX_BYTES:
        tree.problems.append(Problem(path="", message="file too large", allowed=f"at most {MAX_BYTES} bytes"))
        return tree
    try:
        if not _is_shallow(text, tree):
            return tree
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        message = f"not valid YAML: {error.problem or error.context}"
        tree.problems.append(Problem(path="", message=message, line=mark.line + 1 if mark else None))
        return tree
    except (yaml.YAMLError, UnicodeDecodeError, ValueError) as error:
        tree.problems.append(Problem(path="", message=f"not valid YAML: {str(error).splitlines()[0]}"))
        return tree
    if node is None:
        tree.problems.append(Problem(path="", message="the file is empty"))
        return tree
    try:
        _Builder(tree).build_root(node)
    except _TooLarge:
        tree.value = None
    return tree


def _is_shallow(text: str | bytes, tree: YamlTree) -> bool:
    """Whether nesting stays below the limit; the event parser needs no recursion to tell."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                line = event.start_mark.line + 1 if event.start_mark else None
                tree.problems.append(
                    Problem(path="", message="nested too deep", allowed=f"{MAX_DEPTH} levels", line=line)
                )
                return False
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
    return True


class _TooLarge(Exception):
    """The tree has more values than any deployment file needs."""


class _Builder:
    """Turns YAML nodes into dicts, lists and scalars, noting lines and mistakes."""

    def __init__(self, tree: YamlTree) -> None:
        self._tree = tree
        self._constructor = yaml.SafeLoader("")
        self._num_nodes = 0
        self._open: set[int] = set()  # collections being built: meeting one again is a loop

    def build_root(self, node: yaml.Node) -> None:
        self._tree.lines[()] = node.start_mark.line + 1
        self._tree.value = self._build(node, ())

    def _problem(self, path: Path, node: yaml.Node, message: str, *, got: str = "", hint: str = "") -> None:
        line = node.start_mark.line + 1
        self._tree.problems.append(Problem(path=join(*path), message=message, got=got, hint=hint, line=line))

    def _build(self, node: yaml.Node, path: Path) -> Any:
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES:
            message = f"more than {MAX_NODES} values, counting each use of an alias"
            self._problem(path[:2], node, message)
            raise _TooLarge
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        if node.tag not in _PLAIN_TAGS:
            self._problem(path, node, "tags are not allowed", got=node.tag)
            return None
        if id(node) in self._open:
            self._problem(path, node, "an alias contains itself")
            return None
        self._open.add(id(node))
        value: Any
        if isinstance(node, yaml.SequenceNode):
            value = []
            for i, item in enumerate(node.value):
                self._tree.lines[(*path, i)] = item.start_mark.line + 1
                value.append(self._build(item, (*path, i)))
        else:
            value = self._mapping(node, path)
        self._open.discard(id(node))
        return value

    def _mapping(self, node: yaml.Node, path: Path) -> dict[str, Any]:
        value: dict[str, Any] = {}
        for key_node, item in node.value:
            key = self._build(key_node, path)
            if not isinstance(key, str) or isinstance(key_node, yaml.CollectionNode):
                self._problem(path, key_node, "a key must be text", got=repr(key))
                continue
            here = (*path, key)
            if key in value:
                first = self._tree.lines[here]
                self._problem(here, key_node, "the key is given twice", hint=f"first on line {first}")
                continue
            self._tree.lines[here] = key_node.start_mark.line + 1
            value[key] = self._build(item, here)
        return value

    def _scalar(self, node: yaml.ScalarNode, path: Path) -> Any:
        if node.style is None:  # plain, not quoted
            for pattern, hint in _AMBIGUOUS:
                if pattern.match(node.value):
                    message = "YAML readers do not agree on what this word means"
                    self._problem(path, node, message, got=node.value, hint=hint)
                    return None
        if node.tag not in _PLAIN_TAGS:
            message = "merge keys are not allowed" if node.value == "<<" else "tags are not allowed"
            self._problem(path, node, message, got=node.tag)
            return None
        try:
            value = self._constructor.construct_object(node)
        except (yaml.YAMLError, ValueError, OverflowError) as error:
            self._problem(path, node, f"not readable: {error}", got=repr(node.value)[:100])
            return None
        if isinstance(value, str) and not value.isascii() and _SURROGATE.search(value):
            self._problem(path, node, "half of a surrogate pair is no character", got=repr(value)[:100])
            return None
        if isinstance(value, float) and not math.isfinite(value):
            self._problem(path, node, "not a finite number", got=node.value[:100])
            return None
        return value
