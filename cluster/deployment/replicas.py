"""Changes `num_replicas` in the text of a deployment file, and nothing else: comments, order and spaces stay.

The file is parsed to find where the numbers stand, and parsed again when they are changed: if it then says
anything else than what was asked for (an alias, a form of YAML not thought of), it is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from cluster.config.problems import ConfigError, Problem, closest
from cluster.config.yaml_tree import read_yaml
from cluster.deployment.deployment_file import is_ours

_KEY = "num_replicas"
_HINT = "edit the file by hand, then `tandem deploy FILE`"


def with_replicas(text: str, wanted: Mapping[str, int], *, pools: Mapping[str, object], file: str) -> str:
    """The text with these numbers of replicas of our application's deployments. `pools`: those that the
    config has, for names that are not in the file. Raises ConfigError."""
    tree = read_yaml(text)
    if tree.value is None or tree.problems:
        raise ConfigError(tree.problems)
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    index, entries = _entries(tree.value)
    nodes = _child(_child(_child(root, "applications"), index), "deployments")
    problems: list[Problem] = []
    edits: list[tuple[int, int, str]] = []  # start, end, new text
    expected: dict[int, int] = {}
    for name, count in wanted.items():
        place = next((i for i, entry in enumerate(entries) if entry.get("name") == name), None)
        if place is None:
            problems.append(_unknown(name, entries, pools))
        elif entries[place].get("autoscaling_config") is not None:
            hint = "its bounds are autoscaling_config.min_replicas and max_replicas in the file"
            problems.append(Problem(path=name, message="the pool is autoscaled", got=str(count), hint=hint))
        else:
            expected[place] = count
            edits.append(_edit(text, _child(nodes, place), count))
    if problems:
        raise ConfigError(problems)
    for start, end, new in sorted(edits, reverse=True):
        text = text[:start] + new + text[end:]
    _check(text, tree.value, index, expected, file)
    return text


def _entries(tree: Mapping[str, Any]) -> tuple[int, list[Mapping[str, Any]]]:
    """Place of our application, and its deployments."""
    index = next(i for i, app in enumerate(tree["applications"]) if is_ours(app))
    return index, list(tree["applications"][index].get("deployments") or ())


def _unknown(name: str, entries: list[Mapping[str, Any]], pools: Mapping[str, object]) -> Problem:
    names = [str(entry.get("name")) for entry in entries]
    if name in pools:
        return Problem(
            path=name,
            message="the file has no entry of this pool in deployments",
            hint=f"add {{name: {name}, {_KEY}: 1}} there",
        )
    guess = closest(name, names)
    hint = f"did you mean {guess}?" if guess else ""
    return Problem(path=name, message="no such pool", got=repr(name), allowed=", ".join(names), hint=hint)


def _edit(text: str, node: yaml.Node, count: int) -> tuple[int, int, str]:
    """Where the number of an entry stands, or is to stand, and what is to be there."""
    assert isinstance(node, yaml.MappingNode)
    for key, value in node.value:
        if key.value == _KEY:
            return value.start_mark.index, value.end_mark.index, str(count)
    key, value = next((key, value) for key, value in node.value if key.value == "name")
    end = value.end_mark.index
    if node.flow_style:
        return end, end, f", {_KEY}: {count}"
    added = f"{' ' * key.start_mark.column}{_KEY}: {count}"
    newline = "\r\n" if "\r\n" in text else "\n"
    line_end = text.find("\n", end)  # a comment stays with the name
    if line_end < 0:
        return len(text), len(text), newline + added
    return line_end + 1, line_end + 1, added + newline


def _child(node: yaml.Node | None, key: str | int) -> yaml.Node:
    for name, child in _children(node):
        if name == key:
            return child
    raise AssertionError(f"no {key!r}, which the tree has")


def _children(node: yaml.Node | None) -> Iterator[tuple[str | int, yaml.Node]]:
    if isinstance(node, yaml.MappingNode):
        yield from ((key.value, value) for key, value in node.value)
    elif isinstance(node, yaml.SequenceNode):
        yield from enumerate(node.value)


def _check(text: str, before: Any, index: int, expected: Mapping[int, int], file: str) -> None:
    """Raises ConfigError when the changed text does not say what was asked for."""
    wanted = dict(before)
    applications = list(before["applications"])
    deployments = list(applications[index]["deployments"])
    for place, count in expected.items():
        deployments[place] = {**deployments[place], _KEY: count}
    applications[index] = {**applications[index], "deployments": deployments}
    wanted["applications"] = applications
    if read_yaml(text).value != wanted:
        message = f"{_KEY} cannot be changed without changing something else"
        raise ConfigError([Problem(path="deployments", message=message, hint=_HINT, file=file)])
