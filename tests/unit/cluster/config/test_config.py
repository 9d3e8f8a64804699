"""The config tree: every mistake is refused at once, by dotted path, with what would be right."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.config.parse import apply_overrides, check_config, parse_config
from cluster.config.problems import ConfigError, Problem
from router.routing.policy import PlacementPolicy, PolicyConfig
from workers.config import CacheConfig


def problems_of(tree: Any) -> list[Problem]:
    config, problems = check_config(tree)
    assert config is None
    return problems


def pool(**settings: Any) -> dict[str, Any]:
    return {"pools": {"unified": settings}}


def test_an_empty_tree_is_the_embedded_model_in_one_pool() -> None:
    config = parse_config({})
    assert config.model.path == "embedded"
    assert list(config.pools.by_name()) == ["unified"]
    assert config.pools.by_name()["unified"].bundles() == [{"CPU": 1.0}]
    assert config.router.placement_policy() == PolicyConfig(policy=PlacementPolicy.PREFIX)


def test_values_reach_the_leaves_that_the_parts_receive() -> None:
    tree = pool(tensor_parallel=2, cpus_per_rank=0.5, cache={"block_size": 32}, parallel={"flashinfer": True})
    tree |= {"model": {"path": "/m", "dtype": "float32"}, "router": {"policy": "round_robin"}}
    config = parse_config(tree)
    group = config.pools.by_name()["unified"].group(config.model)
    assert (group.model.path, group.model.dtype) == ("/m", "float32")
    assert group.parallel.tensor_parallel == 2 and group.parallel.flashinfer
    assert group.cache == CacheConfig(block_size=32)
    assert config.pools.by_name()["unified"].bundles() == [{"CPU": 0.5}, {"CPU": 0.5}]


def test_cuda_ranks_ask_for_a_gpu_each() -> None:
    config = parse_config(pool(parallel={"device": "cuda"}))
    assert config.pools.by_name()["unified"].bundles() == [{"CPU": 1.0, "GPU": 1.0}]


@pytest.mark.parametrize(
    ("tree", "path", "hint"),
    [
        (pool(tensor_paralel=2), "pools.unified.tensor_paralel", "did you mean tensor_parallel?"),
        ({"pools": {"unifed": {}}}, "pools.unifed", "did you mean unified?"),
        ({"model": {"pth": "x"}}, "model.pth", "did you mean path?"),
        (pool(cache={"blok_size": 1}), "pools.unified.cache.blok_size", "did you mean block_size?"),
        ({"router": {"http": {"leniant": True}}}, "router.http.leniant", "did you mean lenient?"),
        ({"routr": {}}, "routr", "did you mean router?"),
        (pool(parallel={"tensor_parallel": 2}), "pools.unified.parallel.tensor_parallel",
         "it is pools.unified.tensor_parallel"),
        ({"router": {"http": {"model_name": "x"}}}, "router.http.model_name", "it is model.name"),
    ],
)  # fmt: skip
def test_unknown_keys_at_every_level_get_a_suggestion(tree: Any, path: str, hint: str) -> None:
    [problem] = problems_of(tree)
    assert (problem.path, problem.message, problem.hint) == (path, "unknown key", hint)


@pytest.mark.parametrize(
    ("tree", "path", "got"),
    [
        (pool(tensor_parallel="2"), "pools.unified.tensor_parallel", "'2'"),
        (pool(tensor_parallel=0), "pools.unified.tensor_parallel", "0"),
        (pool(tensor_parallel=True), "pools.unified.tensor_parallel", "True"),
        (pool(cache={"memory_fraction": 0}), "pools.unified.cache.memory_fraction", "0.0"),
        (pool(cache={"memory_fraction": 1.5}), "pools.unified.cache.memory_fraction", "1.5"),
        ({"model": {"dtype": "fp4"}}, "model.dtype", "'fp4'"),
        ({"model": {"quantization": "int3"}}, "model.quantization", "'int3'"),
        ({"model": {"path": 3}}, "model.path", "3"),
        ({"router": {"policy": "prefx"}}, "router.policy", "'prefx'"),
        ({"pools": []}, "pools", "[]"),
        ({"router": {"http": {"cors_origins": ["http://x", 1]}}}, "router.http.cors_origins.1", "1"),
    ],
)
def test_wrong_values_are_named(tree: Any, path: str, got: str) -> None:
    [problem] = problems_of(tree)
    assert (problem.path, problem.got) == (path, got)
    assert problem.allowed


def test_all_mistakes_come_at_once() -> None:
    tree = {"model": {"pth": 1, "dtype": 2}, **pool(tensor_parallel="x", cach={})}
    paths = {problem.path for problem in problems_of(tree)}
    assert paths == {"model.pth", "model.dtype", "pools.unified.tensor_parallel", "pools.unified.cach"}


def test_a_pool_too_small_for_one_request_is_refused_with_the_least_size() -> None:
    [problem] = problems_of({"model": {"max_model_len": 100}, **pool(cache={"num_blocks": 6})})
    assert (problem.path, problem.allowed) == ("pools.unified.cache.num_blocks", "at least 7")


def test_overrides_set_what_they_name_and_leave_the_tree_alone() -> None:
    tree = {"model": {"path": "/a"}}
    settings = [
        "model.path=/b",
        "pools.unified.tensor_parallel=2",
        "router.policy=round_robin",
        "model.name=",
    ]
    assert apply_overrides(tree, settings) == {
        "model": {"path": "/b", "name": ""},
        "pools": {"unified": {"tensor_parallel": 2}},
        "router": {"policy": "round_robin"},
    }
    assert tree == {"model": {"path": "/a"}}


def test_overrides_that_name_nothing_are_refused_together() -> None:
    settings = ["model.pth=1", "pools.unified=3", "router.policy", "model.path.x=1", "model.name=on"]
    with pytest.raises(ConfigError) as caught:
        apply_overrides({}, settings)
    paths = [problem.path for problem in caught.value.problems]
    assert paths == ["model.pth", "pools.unified", "router.policy", "model.path.x", "model.name"]
    assert caught.value.problems[0].hint == "did you mean path?"
