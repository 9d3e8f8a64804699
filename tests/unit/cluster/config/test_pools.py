"""Pools: which may stand together, and the Serve deployments that they become."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ray.serve._private.build_app import build_app
from ray.serve.handle import DeploymentHandle

from cluster.app import assemble
from cluster.config.parse import check_config, parse_config
from cluster.config.problems import ConfigError
from cluster.deployment.load import load_deployment
from tests.unit.cluster.conftest import World
from workers.config import CacheConfig
from workers.types import Role

DEPLOY = Path(__file__).parents[4] / "deploy"
FILE = DEPLOY / "local-disaggregated.yaml"


def said(pools: Any) -> list[str]:
    return [problem.render() for problem in check_config({"pools": pools})[1]]


@pytest.mark.parametrize(
    "names",
    [["unified"], ["prefill", "decode"], ["unified", "prefill", "decode"], ["decode"], ["unified", "decode"]],
)
def test_pools_that_stand_together(names: list[str]) -> None:
    assert list(parse_config({"pools": {name: {} for name in names}}).pools.by_name()) == names


def test_ranks_for_which_ray_sets_nothing_aside() -> None:
    """Serve refuses the application: bundles of resources that are all 0."""
    for cpus in (0, 0.00001):
        assert said({"unified": {"cpus_per_rank": cpus}}) == [
            "pools.unified.cpus_per_rank: Ray sets nothing aside for a rank, and makes no place for it then; "
            f"got {cpus:g}; allowed: at least 0.0001, or gpus_per_rank above 0"
        ]
    for pool in ({"cpus_per_rank": 0.0001}, {"cpus_per_rank": 0, "gpus_per_rank": 0.5}):
        assert said({"unified": pool}) == []


def test_pools_that_do_not() -> None:
    assert said({"prefill": {}}) == [
        "pools.prefill: a prefill pool without a decode pool: it only computes prompts, nobody would answer; "
        "add pools.decode, or call the pool unified"
    ]
    assert said({"prefill": {"cache": {"block_size": 8}}, "decode": {"cache": {"block_size": 32}}}) == [
        "pools.decode.cache.block_size: groups cannot read each other's blocks: "
        "pools.prefill.cache.block_size is 8; got 32; allowed: 8; give both the same"
    ]
    assert said({"prefill": {"cache": {"dtype": "int8"}}, "decode": {}}) == [
        "pools.decode.cache.dtype: groups cannot read each other's blocks: pools.prefill.cache.dtype is "
        "int8; got auto; allowed: int8; give both the same"
    ]
    assert said({"unified": {"cache": {"dtype": "int4"}}}) == [
        "pools.unified.cache.dtype: not one of the choices; got 'int4'; allowed: auto, int8"
    ]
    assert said({"prefill": {"cache": {"prefix_reuse": False}}, "decode": {}}) == [
        "pools.prefill.cache.prefix_reuse: groups find each other's blocks by prefix reuse; got false; "
        "allowed: true; or leave out the prefill pool"
    ]
    assert said({"prefill": {}, "decode": {"transfer": {"enabled": False}}}) == [
        "pools.decode.transfer.enabled: decode groups read the blocks of prefill groups; got false; "
        "allowed: true; or leave out the prefill pool"
    ]
    memory, sockets = ({"transfer": {"transport": name}} for name in ("memory", "sockets"))
    assert said({"prefill": memory, "decode": sockets}) == [
        "pools.decode.transfer.transport: groups have no way to each other: pools.prefill.transfer.transport "
        "is memory; got sockets; allowed: memory, auto"
    ]
    assert said({"prefill": memory, "decode": {}}) == said({"prefill": memory, "decode": memory}) == []
    assert said({"prefill": None, "decode": {}}) == [
        "pools.prefill: the pool is empty; got null; write {} for a pool with all defaults"
    ]
    assert said({"prefil": {}, "decode": {}}) == [
        "pools.prefil: unknown key; got 'prefil'; allowed: decode, prefill, unified; did you mean prefill?"
    ]
    assert said({"prefill": {"tensor_parallel": 0}, "decode": {"cache": {"blok_size": 1}}}) == [
        "pools.decode.cache.blok_size: unknown key; got 'blok_size'; allowed: block_size, dtype, "
        "max_bytes, memory_fraction, num_blocks, prefix_reuse; did you mean block_size?"
    ]
    assert said({"prefill": {"tensor_parallel": 0}, "decode": {}}) == [
        "pools.prefill.tensor_parallel: out of range; got 0; allowed: at least 1, at most 1024"
    ]


def test_neither_side_gives_the_other_up_before_it_can_be_heard() -> None:
    slow = {"transfer": {"heartbeat_s": 6}}
    hint = "pools.decode.transfer.heartbeat_s is 6"
    message = "shorter than two heartbeats of the other side; got 10; allowed: at least 12"
    assert said({"prefill": {}, "decode": slow}) == [
        f"pools.{pool}.transfer.{key}: {message}; {hint}"
        for pool in ("prefill", "decode")
        for key in ("lease_s", "stall_s")
    ]
    patient = {"transfer": {"lease_s": 12, "stall_s": 12}}
    slow["transfer"] |= {"lease_s": 12, "stall_s": 12}
    assert said({"prefill": patient, "decode": slow}) == []


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("  - {name: decode, num_replicas: 1, max_surge_percent: 100}\n", "",
         "applications[0].args.pools.decode: a pool without an entry in deployments; add {name: decode, "
         "num_replicas: 1} there; how many groups it has is num_replicas of the deployment of that name"),
        ("{name: decode,", "{name: unified,", "applications[0].deployments[2].name: unknown key; got "
         "'unified'; allowed: decode, prefill, router"),
        ("{name: decode,", "{name: decod,", "did you mean decode?"),
        ("      decode:  #", "      decode2:  #", "did you mean decode?"),
    ],
)  # fmt: skip
def test_deployments_and_pools_name_each_other(tmp_path: Path, old: str, new: str, said: str) -> None:
    text = FILE.read_text()
    assert old in text
    file = tmp_path / "broken.yaml"
    file.write_text(text.replace(old, new))
    with pytest.raises(ConfigError) as caught:
        load_deployment(file)
    assert said in str(caught.value)
    assert all(line.startswith(f"{file}:") for line in str(caught.value).splitlines())


def test_a_pool_of_the_command_line_needs_a_deployment_too() -> None:
    assert load_deployment(FILE, assignments=["pools.decode.tensor_parallel=3"]).num_cpus() == 2
    assert load_deployment(FILE.with_name("local-autoscaled.yaml")).num_cpus() == 2  # three of a half
    for assignment, said in (
        ("pools.unified.tensor_parallel=1", "command line:pools.unified: a pool without an entry"),
        ("pools.decode.cache.block_size=8", "command line:pools.decode.cache.block_size: groups cannot read"),
    ):
        with pytest.raises(ConfigError) as caught:
            load_deployment(FILE, assignments=[assignment])
        (problem,) = caught.value.problems
        assert problem.render().startswith(said)


def test_each_pool_is_a_deployment_and_the_router_has_a_handle_of_every_one() -> None:
    pools = {"prefill": {"drain_timeout_s": 50}, "decode": {"tensor_parallel": 2, "cache": {"num_blocks": 9}}}
    config = parse_config({"pools": pools})
    built = build_app(assemble(config, replace(config.model, path="/m", name="x"), "00"), name="tandem")
    assert built.ingress_deployment_name == "router"
    by_name = {deployment.name: deployment for deployment in built.deployments}
    assert sorted(by_name) == ["decode", "prefill", "router"]
    (prefill,), (decode,) = by_name["prefill"].init_args, by_name["decode"].init_args
    assert (prefill.pool, prefill.role, decode.pool, decode.role) == (
        "prefill", Role.PREFILL, "decode", Role.DECODE)  # fmt: skip
    assert (prefill.config.parallel.tensor_parallel, decode.config.parallel.tensor_parallel) == (1, 2)
    assert decode.config.cache == CacheConfig(num_blocks=9)
    start, handles = by_name["router"].init_args
    assert start.tokenizer_folder == "/m"
    assert list(handles) == ["prefill", "decode"]
    assert all(isinstance(handle, DeploymentHandle) for handle in handles.values())


def test_validate_shows_the_pools(world: World, tiny_model: Path) -> None:
    for file, sizes in (
        ("local-disaggregated.yaml", ("1 rank", "1 rank")),
        ("local-disaggregated-tp.yaml", ("1 rank", "2 ranks")),
    ):
        done = world.run("validate", str(DEPLOY / file), "--set", f"model.path={tiny_model}")
        assert (done.exit_code, done.stderr) == (0, "")
        assert done.stdout.splitlines()[3:] == [
            f"  pool         prefill: 1 group of {sizes[0]}",
            f"  pool         decode: 1 group of {sizes[1]}",
        ]
