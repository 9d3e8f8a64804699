"""Values of the config tree's leaves: every number has a range, and texts hold what they should."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import is_dataclass
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
from pydantic import BaseModel

from cluster.config.leaves import RANGES, Range, pattern_of
from cluster.config.parse import check_config
from cluster.config.problems import Problem
from cluster.config.tree import TandemConfig
from tests.unit.router.client import CHAT, COMPLETIONS, call
from tests.unit.router.fakes import stack


def numbers(kind: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of every number that the tree may hold."""
    options = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    for option in options:
        if option in (int, float):
            yield path
        elif isinstance(option, type) and (issubclass(option, BaseModel) or is_dataclass(option)):
            hints = get_type_hints(option)
            for name in option.model_fields if issubclass(option, BaseModel) else option.__dataclass_fields__:
                yield from numbers(hints[name], (*path, name))


PATHS = sorted(set(numbers(TandemConfig)))


def problems_of(path: tuple[str, ...], value: Any) -> list[Problem]:
    """What is said of a tree with one value."""
    tree: Any = value
    for key in reversed(path):
        tree = {key: tree}
    return check_config(tree)[1]


def test_every_number_has_a_range_and_every_range_a_number() -> None:
    assert {pattern_of(path) for path in PATHS} == set(RANGES)
    assert len(PATHS) > 60


@pytest.mark.parametrize("path", PATHS, ids=".".join)
def test_both_ends_of_every_range_are_guarded(path: tuple[str, ...]) -> None:
    limits = RANGES[pattern_of(path)]
    below = limits.least - 1 if limits.is_least_legal else limits.least
    for value in (below, limits.most + 1, -1, 10**15):
        if limits.allows(value):
            continue
        found = [p for p in problems_of(path, value) if p.path == ".".join(path)]
        assert [(p.message, p.allowed) for p in found] == [("out of range", str(limits))]
    for odd in (True, "1", [1]):
        assert [p.message for p in problems_of(path, odd) if p.path == ".".join(path)] == ["wrong type"]
    assert not limits.allows(float("nan")) and not limits.allows(float("inf")) and not limits.allows(10**15)


@pytest.mark.parametrize("end", ["least", "most"])
def test_a_router_serves_with_every_limit_at_an_end_of_its_range(end: str) -> None:
    settings: dict[str, float] = {}
    for path, limits in RANGES.items():
        part, _, name = path.rpartition(".")
        # 0.01 s for a text is for an idle machine.
        if part == "router.http" and name not in ("render_timeout_s", "tokenize_timeout_s"):
            settings[name] = getattr(limits, end)
    assert len(settings) > 20
    router = stack(**settings)
    for path, body in (
        (CHAT, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 2, "stream": True}),
    ):
        assert call(router.app, path, body).status_code == 200
    router.service.close()


@pytest.mark.parametrize(
    ("limits", "text"),
    [
        (Range(1, 1 << 24), "at least 1, at most 16777216"),
        (Range(0, 1, is_least_legal=False), "above 0, at most 1"),
        (Range(0.1, 1e13), "at least 0.1, at most 10000000000000"),
    ],
)
def test_a_range_reads_as_people_write_numbers(limits: Range, text: str) -> None:
    assert str(limits) == text


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_not_finite_is_named(value: float) -> None:
    path = ("router", "http", "keep_alive_s")
    (problem,) = problems_of(path, value)
    assert (problem.path, problem.message, problem.got) == (".".join(path), "not a finite number", str(value))
    (problem,) = problems_of(("router", "http", "cors_origins"), ["*", value])
    assert problem.path == "router.http.cors_origins[1]"


@pytest.mark.parametrize(
    "path", [("model", "path"), ("model", "name"), ("router", "http", "api_keys_file")], ids=".".join
)
@pytest.mark.parametrize("text", ["/a\0b", "/a\r\nx: y", "/a\x1b[2J", "/\x85"])
def test_control_characters_are_refused(path: tuple[str, ...], text: str) -> None:
    (problem,) = problems_of(path, text)
    assert (problem.path, problem.message) == (".".join(path), "holds a control character")


@pytest.mark.parametrize(
    "origin",
    ["", "a", "https://a.example/", "https://a.example\r\nx: y", "https://ä.example", "https://*.a.example"],
)
def test_origins_that_no_browser_sends_are_refused(origin: str) -> None:
    problems = problems_of(("router", "http", "cors_origins"), ["*", origin])
    assert {problem.path for problem in problems} == {"router.http.cors_origins"}
    assert problems[-1].message == "not an origin as browsers send it"


def test_origins_of_browsers_are_taken() -> None:
    origins = ["*", "null", "https://a.example", "http://localhost:3000", "http://[::1]:80", "app://x"]
    assert problems_of(("router", "http", "cors_origins"), origins) == []


def test_the_key_file_needs_an_absolute_path() -> None:
    (problem,) = problems_of(("router", "http", "api_keys_file"), "keys.txt")
    assert (problem.message, problem.got) == ("is no absolute path", "'keys.txt'")
    assert problems_of(("router", "http", "api_keys_file"), "~/keys.txt") == []
    assert len(problems_of(("router", "http", "api_keys_file"), "~other/keys.txt")) == 1
