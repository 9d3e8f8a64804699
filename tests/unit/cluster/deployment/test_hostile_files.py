"""Deployment files with any value in any place: taken or refused in our own words, never an exception."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.config.problems import ConfigError
from cluster.deployment.load import CommandLine, check_all, check_model, load_deployment, read_deployment
from cluster.deployment.scaling_checks import POLICY

SCALED = {"min_replicas": 1, "max_replicas": 2, "upscale_delay_s": 0, "downscale_delay_s": 0}
GOOD: dict[str, Any] = {
    "proxy_location": "HeadOnly",
    "http_options": {"host": "127.0.0.1", "port": 8000, "request_timeout_s": 60.0},
    "grpc_options": {"port": 9000},
    "applications": [
        {
            "name": "tandem",
            "route_prefix": "/",
            "import_path": "cluster.app:build",
            "args": {
                "model": {"path": "MODEL", "name": "tiny"},
                "pools": {"unified": {"tensor_parallel": 1, "cache": {"num_blocks": 100}}},
                "router": {"policy": "prefix", "http": {"cors_origins": ["*"], "text_threads": 2}},
            },
            "deployments": [
                {"name": "router", "num_replicas": 1},
                {"name": "unified", "autoscaling_config": SCALED},
            ],
            "autoscaling_policy": {"policy_function": POLICY, "policy_kwargs": {}},
        }
    ],
}
JUNK: list[Any] = [None, True, 0, -1, 10**30, 0.5, "", "x", "\0", "8000", [], [None], [[]], {}, {"x": None}]

KEYS = ["", ".", "x.y", "[", "[0]", "x[0]", "x[y", "[y]", f"[{'9' * 5000}]", "\0", "é"]


def places(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The path of every value."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def put(tree: Any, path: tuple[str | int, ...], value: Any) -> Any:
    """A copy of the tree with another value at a place."""
    if not path:
        return value
    changed = copy.deepcopy(tree)
    node = changed
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    return changed


def at(tree: Any, path: tuple[str | int, ...]) -> Any:
    """The value at a place."""
    for key in path:
        tree = tree[key]
    return tree


@pytest.fixture
def good(tiny_model: Path) -> Any:
    return put(GOOD, ("applications", 0, "args", "model", "path"), str(tiny_model))


def test_the_good_file_is_good(tmp_path: Path, good: Any) -> None:
    file = tmp_path / "good.yaml"
    file.write_text(json.dumps(good))
    assert check_model(load_deployment(file)) is not None


@pytest.mark.parametrize("place", list(places(GOOD)), ids=lambda path: ".".join(map(str, path)) or "root")
def test_any_value_in_any_place_is_taken_or_refused(
    tmp_path: Path, good: Any, place: tuple[str | int, ...]
) -> None:
    file = tmp_path / "changed.yaml"
    for junk in JUNK:
        file.write_text(json.dumps(put(good, place, junk)))
        try:
            deployment, _ = check_all(read_deployment(file), str(file), CommandLine())
        except ConfigError as error:
            assert all("Error" not in problem.message for problem in error.problems), error
        else:
            assert isinstance(deployment.host, str)
            assert type(deployment.port) is int
            assert all(type(count) is int for count in deployment.num_replicas.values())
            assert deployment.num_cpus() >= 0


@pytest.mark.parametrize("key", KEYS, ids=lambda key: ascii(key)[:10])
def test_any_key_in_any_mapping_is_refused_at_its_line(tmp_path: Path, good: Any, key: str) -> None:
    file = tmp_path / "changed.yaml"
    for place in places(GOOD):
        if not isinstance(at(good, place), dict) or "policy_kwargs" in place:
            continue
        file.write_text(json.dumps(put(good, (*place, key), 1), indent=1))
        with pytest.raises(ConfigError) as caught:
            check_all(read_deployment(file), str(file), CommandLine())
        assert all(problem.line for problem in caught.value.problems), caught.value
