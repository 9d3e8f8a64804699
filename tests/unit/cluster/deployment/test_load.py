"""Deployment files with mistakes: each refused on one line of the form file:line:key, nothing started."""

from __future__ import annotations

from pathlib import Path

import pytest
from ray.serve.schema import ServeDeploySchema

from cluster.config.problems import ConfigError
from cluster.config.yaml_tree import read_yaml
from cluster.deployment.load import CommandLine, check_all, check_model, load_deployment, read_deployment
from tests.unit.cluster.conftest import World

DEPLOY = Path(__file__).parents[4] / "deploy"
GOOD = """\
proxy_location: HeadOnly
http_options: {host: 127.0.0.1, port: 8000}
applications:
- name: tandem
  route_prefix: /
  import_path: cluster.app:build
  args:
    model:
      path: embedded
    pools:
      unified:
        tensor_parallel: 1
    router:
      policy: prefix
  deployments:
  - {name: router, num_replicas: 1}
  - {name: unified, num_replicas: 1}
"""
ARGS = "applications[0].args"
UNIFIED = "applications[0].deployments[1]"


def problems_of(tmp_path: Path, *changes: tuple[str, str]) -> list[str]:
    """What is said of the good file after each (old, new) replacement, without the file's name."""
    text = GOOD
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    file = tmp_path / "broken.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_deployment(file)
    lines = str(caught.value).splitlines()
    assert all(line.startswith(f"{file}:") for line in lines)
    return [line.removeprefix(f"{file}:") for line in lines]


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("path: embedded", "path: !!python/object/apply:os.system [id]",
         f"9:{ARGS}.model.path: tags are not allowed; got tag:yaml.org,2002:python/object/apply:os.system"),
        ("path: embedded", "path: &loop [*loop]", f"9:{ARGS}.model.path[0]: an alias contains itself"),
        ("path: embedded", "path: x\n      path: y",
         f"10:{ARGS}.model.path: the key is given twice; first on line 9"),
        ("path: embedded", "path: x\n\tname: y",
         "10: not valid YAML: found character '\\t' that cannot start any token"),
        ("path: embedded", "name: on", f"9:{ARGS}.model.name: YAML readers do not agree on what this word "
         "means; got on; write true or false, or quote it"),
        ("tensor_parallel: 1", "tensor_parallel: 010", f"12:{ARGS}.pools.unified.tensor_parallel: YAML "
         "readers do not agree on what this word means; got 010; write a decimal number, or quote it"),
        ("tensor_parallel: 1", "tensor_paralel: 2",
         f"12:{ARGS}.pools.unified.tensor_paralel: unknown key; got 'tensor_paralel'; allowed: cache, "
         "cpus_per_rank, drain_timeout_s, gpus_per_rank, parallel, placement, schedule, speculative, "
         "start_timeout_s, "
         "tensor_parallel, transfer, wait_for_resources; did you mean tensor_parallel?"),
        ("tensor_parallel: 1", "tensor_parallel: 0",
         f"12:{ARGS}.pools.unified.tensor_parallel: out of range; got 0; allowed: at least 1, at most 1024"),
        ("tensor_parallel: 1", "tensor_parallel: '2'",
         f"12:{ARGS}.pools.unified.tensor_parallel: wrong type; got '2'; allowed: a valid integer"),
        ("tensor_parallel: 1", "cache: {memory_fraction: 0}",
         f"12:{ARGS}.pools.unified.cache.memory_fraction: out of range; got 0.0; "
         "allowed: above 0, at most 1"),
        ("tensor_parallel: 1", "cache: {memory_fraction: 1.01}",
         f"12:{ARGS}.pools.unified.cache.memory_fraction: out of range; got 1.01; "
         "allowed: above 0, at most 1"),
        ("unified, num_replicas: 1", "unified, num_replicas: 0",
         f"17:{UNIFIED}.num_replicas: a deployment of no replicas; got 0; Serve takes 1 or more; leave this "
         "entry and its pool out, or let Serve stop idle replicas: autoscaling_config: {min_replicas: 0, "
         "max_replicas: 1} instead"),
        ("unified, num_replicas: 1", "unified, num_replicas: -1",
         f"17:{UNIFIED}.num_replicas: input should be greater than 0; got -1"),
        ("unified, num_replicas: 1", "unified, autoscaling_config: {min_replicas: 3, max_replicas: 1}",
         f"17:{UNIFIED}.autoscaling_config: max_replicas (1) must be greater than or equal to "
         "min_replicas (3)!"),
        ("port: 8000", "port: 80", "2:http_options.port: port out of range; got 80; allowed: 1024 to 65535"),
        ("127.0.0.1", "0.0.0.0",
         "2:http_options.host: the HTTP port would be open to other machines; got '0.0.0.0'; allowed: "
         "127.0.0.1; set router.http.api_keys_file, or pass --i-know-this-is-open if a firewall or an "
         "authenticating proxy stands before it"),
        ("path: embedded", "path: ''", f"9:{ARGS}.model.path: is empty; give a folder, or embedded"),
        ("policy: prefix", "policy: prefx", f"14:{ARGS}.router.policy: not one of the choices; got 'prefx'; "
         "allowed: 'prefix', 'least_loaded', 'round_robin'"),
    ],
)  # fmt: skip
def test_one_mistake_is_one_line_with_its_place(tmp_path: Path, old: str, new: str, line: str) -> None:
    assert line in problems_of(tmp_path, (old, new))


def test_every_mistake_of_a_file_is_said_at_once_in_its_order(tmp_path: Path) -> None:
    lines = problems_of(
        tmp_path,
        ("port: 8000", "port: 80, prt: 1"),
        ("path: embedded", "pth: embedded"),
        ("tensor_parallel: 1", "tensor_parallel: -2"),
        ("router, num_replicas: 1", "roter, num_replicas: 0"),
    )
    places = [line.split(": ")[0] for line in lines]
    assert sorted(places) == sorted(
        [
            "2:http_options.prt",
            "2:http_options.port",
            f"9:{ARGS}.model.pth",
            "16:applications[0].deployments[0].name",
            "16:applications[0].deployments[0].num_replicas",
        ]
    )
    assert [int(place.split(":")[0]) for place in places] == [2, 2, 9, 16, 16]
    # Ranges are looked at once all keys and types are right.
    assert problems_of(tmp_path, ("tensor_parallel: 1", "tensor_parallel: -2"))[0].startswith("12:")


def test_mistakes_of_file_and_command_line_come_together(tmp_path: Path) -> None:
    file = tmp_path / "broken.yaml"
    file.write_text(GOOD.replace("policy: prefix", "policy: 3"))
    with pytest.raises(ConfigError) as caught:
        load_deployment(file, port=80, assignments=["model.pth=x", "model.path"])
    assert [(problem.file, problem.path) for problem in caught.value.problems] == [
        (str(file), f"{ARGS}.router.policy"),
        ("command line", "--port"),
        ("command line", "model.pth"),
        ("command line", "model.path"),
    ]


def test_a_pool_too_small_for_the_longest_request_names_the_least_size(tmp_path: Path) -> None:
    file = tmp_path / "good.yaml"
    file.write_text(GOOD)
    assignments = ["model.max_model_len=1000", "pools.unified.cache.num_blocks=62"]
    with pytest.raises(ConfigError) as caught:
        load_deployment(file, assignments=assignments)
    assert str(caught.value) == (
        "command line:pools.unified.cache.num_blocks: the pool is too small for one request of "
        "model.max_model_len 1000; got 62; allowed: at least 63"
    )
    assignments[1] = "pools.unified.cache.num_blocks=63"
    config = load_deployment(file, assignments=assignments).config
    assert config.pools.by_name()["unified"].cache.num_blocks == 63


def test_the_model_is_compared_with_the_pools(tmp_path: Path, tiny_model: Path) -> None:
    """4 heads and 2 KV heads, context 128."""
    file = tmp_path / "good.yaml"
    file.write_text(GOOD)
    model = f"model.path={tiny_model}"
    for size in (1, 2, 4):
        assignments = [model, f"pools.unified.tensor_parallel={size}"]
        checkpoint = check_model(load_deployment(file, assignments=assignments))
        assert checkpoint is not None and checkpoint.folder == tiny_model
    assignments = [model, "pools.unified.tensor_parallel=3", "model.max_model_len=129"]
    with pytest.raises(ConfigError) as caught:
        check_model(load_deployment(file, assignments=assignments))
    length, ranks = caught.value.problems
    assert (length.path, length.got, length.allowed) == ("model.max_model_len", "129", "at most 128")
    assert (length.file, ranks.file) == ("command line", "command line")
    assert ranks.path == "pools.unified.tensor_parallel"
    for part in ("4", "3", "1, 2, 4"):
        assert part in ranks.message


def test_the_model_s_path_means_the_same_in_every_process(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "good.yaml"
    file.write_text(GOOD)
    monkeypatch.chdir(tiny_model.parent)
    monkeypatch.setenv("HOME", str(tiny_model.parent))
    absolute = str(tiny_model)
    written = {"embedded": "embedded", "SmolLM2-135M-Instruct": "embedded", tiny_model.name: absolute}
    for given, wanted in {**written, f"~/{tiny_model.name}": absolute, absolute: absolute}.items():
        deployment = load_deployment(file, assignments=[f"model.path={given}"])
        assert deployment.config.model.path == wanted
        assert deployment.tree["applications"][0]["args"]["model"]["path"] == wanted


def test_the_folder_of_a_draft_model_means_the_same_in_every_process(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "good.yaml"
    file.write_text(GOOD)
    monkeypatch.chdir(tiny_model.parent)
    path = "pools.unified.speculative"
    given = [f"{path}.method=draft_model", f"{path}.model={tiny_model.name}"]
    deployment = load_deployment(file, assignments=given)
    assert deployment.config.pools.unified is not None
    assert deployment.config.pools.unified.speculative.model == str(tiny_model)
    tree = deployment.tree["applications"][0]["args"]["pools"]["unified"]["speculative"]
    assert tree == {"method": "draft_model", "model": str(tiny_model)}


def test_mistakes_of_the_model_come_with_the_others(tmp_path: Path) -> None:
    file = tmp_path / "broken.yaml"
    for right, wrong in (("port: 8000", "port: 80"), ("policy: prefix", "policy: 3")):
        file.write_text(GOOD.replace("path: embedded", "path: /nowhere/model").replace(right, wrong))
        with pytest.raises(ConfigError) as caught:
            check_all(read_deployment(file), str(file), CommandLine())
        problem = caught.value.problems[1]
        assert (problem.file, problem.line, problem.path) == (str(file), 9, f"{ARGS}.model.path")
        with pytest.raises(ConfigError) as caught:
            given = CommandLine(assignments=("model.path=/nowhere/else",))
            check_all(read_deployment(file), str(file), given)
        assert caught.value.problems[1].file == "command line"
        assert "/nowhere/else" in caught.value.problems[1].message


def test_a_refused_word_is_one_mistake(tmp_path: Path) -> None:
    (line,) = problems_of(tmp_path, ("tensor_parallel: 1", "tensor_parallel: 01"))
    assert line.startswith(f"12:{ARGS}.pools.unified.tensor_parallel: YAML readers do not agree")


def test_one_port_for_http_and_grpc_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "good.yaml"
    grpc = "\ngrpc_options: {port: 8000}\n"
    (line,) = problems_of(tmp_path, ("\napplications:", f"{grpc}applications:"))
    assert line.endswith(
        "grpc_options.port: the port is given twice; got 8000; http_options.port is the same"
    )
    file.write_text(GOOD.replace("\napplications:", "\ngrpc_options: {}\napplications:"))
    assert load_deployment(file).port == 8000
    with pytest.raises(ConfigError) as caught:
        load_deployment(file, port=9000)
    (problem,) = caught.value.problems
    assert (problem.file, problem.path, problem.got) == ("command line", "--port", "9000")


def test_weights_that_lead_outside_the_folder_are_refused(tmp_path: Path, tiny_model: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in tiny_model.iterdir():
        if file.name != "model.safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    (folder / "model.safetensors.index.json").write_text(
        '{"weight_map": {"model.norm.weight": "../model.safetensors"}}'
    )
    (tmp_path / "model.safetensors").write_bytes((tiny_model / "model.safetensors").read_bytes())
    deployment_file = tmp_path / "good.yaml"
    deployment_file.write_text(GOOD)
    with pytest.raises(ConfigError, match=r"\.\./model\.safetensors"):
        check_model(load_deployment(deployment_file, assignments=[f"model.path={folder}"]))


KEYS = ("policy: prefix", "http: {api_keys_file: ~/keys}")


def test_a_port_that_asks_for_keys_may_be_open(tmp_path: Path) -> None:
    file = tmp_path / "open.yaml"
    file.write_text(GOOD.replace("127.0.0.1", "0.0.0.0").replace(*KEYS))
    assert load_deployment(file).host == "0.0.0.0"
    (line,) = problems_of(tmp_path, ("127.0.0.1", "0.0.0.0"), (KEYS[0], "http: {api_keys_file: null}"))
    assert line.startswith("2:http_options.host: the HTTP port would be open to other machines")


def test_another_application_beside_ours_asks_for_no_keys(tmp_path: Path) -> None:
    other = "- {name: other, route_prefix: /other, import_path: 'their.app:app'}\n"
    lines = problems_of(
        tmp_path, ("127.0.0.1", "0.0.0.0"), KEYS, ("- name: tandem", f"{other}- name: tandem")
    )
    assert [line.partition(":")[2].split(":")[0] for line in lines] == ["http_options.host"]


def test_the_command_says_all_and_starts_nothing(world: World, tmp_path: Path) -> None:
    file = tmp_path / "broken.yaml"
    file.write_text(GOOD.replace("path: embedded", "pth: x").replace("policy: prefix", "policy: prefx"))
    for command in ("validate", "serve", "deploy"):
        done = world.run(command, str(file))
        assert (done.exit_code, done.stdout, world.launcher.calls, world.server.puts) == (2, "", [], [])
        assert [line.split(": ")[0] for line in done.stderr.splitlines()] == [
            f"{file}:9:{ARGS}.model.pth",
            f"{file}:14:{ARGS}.router.policy",
        ]


@pytest.mark.parametrize("file", sorted(DEPLOY.glob("*.yaml")), ids=lambda file: file.name)
def test_every_shipped_file_passes_our_check_and_ray_s_own(file: Path) -> None:
    """`serve deploy FILE` gives the file as it stands to Ray's schema, so that must take it too."""
    deployment = load_deployment(file)
    schema = ServeDeploySchema.model_validate(read_yaml(file.read_bytes()).value)
    (application,) = schema.applications
    assert application.import_path == "cluster.app:build"
    pools = deployment.config.pools.by_name()
    assert {entry.name for entry in application.deployments} == {"router", *pools}
    keys = deployment.config.router.http.api_keys_file
    assert deployment.host == ("127.0.0.1" if keys is None else "0.0.0.0")
    assert schema.http_options.host == deployment.host
    assert schema.http_options.port == deployment.port == 8000
    assert deployment.config.model.path == "embedded"
