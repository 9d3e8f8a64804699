"""Files that bring machines up: ours pass Ray's strict schema; mistakes are told, each with its line."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from cluster.config.problems import ConfigError
from cluster.deployment.cluster_files import FileKind, check_cluster_file
from cluster.deployment.deployment_file import read_file
from tests.unit.cluster.conftest import World

ROOT = Path(__file__).parents[4]
RAY_FILES = sorted((ROOT / "cluster" / "ray").glob("*.yaml"))
ON_PREMISE = ROOT / "cluster" / "ray" / "on-premise.yaml"
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
PACKAGES = [name.rstrip("*") for name in SETUPTOOLS["packages"]["find"]["include"]]
SERVICE = ROOT / "deploy" / "kuberay" / "rayservice.yaml"


def changed(tmp_path: Path, file: Path, old: str, new: str) -> list[str]:
    """What is said of a shipped file after a replacement, without the file's name."""
    text = file.read_text()
    assert old in text
    broken = tmp_path / "broken.yaml"
    broken.write_text(text.replace(old, new, 1))
    with pytest.raises(ConfigError) as caught:
        check_cluster_file(read_file(broken), str(broken))
    return [line.removeprefix(f"{broken}:") for line in str(caught.value).splitlines()]


def line_of(file: Path, text: str) -> int:
    return next(i for i, line in enumerate(file.read_text().splitlines(), 1) if text in line)


def test_there_is_a_file_for_every_place() -> None:
    assert [file.stem for file in RAY_FILES] == ["aws", "gcp", "on-premise"]


@pytest.mark.parametrize("file", RAY_FILES, ids=lambda file: file.name)
def test_ray_takes_every_cluster_file(file: Path) -> None:
    config = prepare_config(yaml.safe_load(file.read_text()))
    validate_config(config)
    assert check_cluster_file(read_file(file), str(file)) is FileKind.RAY_CLUSTER
    for remote, local in config["file_mounts"].items():
        assert local == remote or (remote == f"~/tandem/{local}" and (ROOT / local).exists())
    assert set(PACKAGES) <= set(config["file_mounts"].values())


def test_the_image_has_every_package() -> None:
    lines = (ROOT / "deploy" / "kuberay" / "Containerfile").read_text().splitlines()
    assert {f"COPY --chown=tandem {package} {package}" for package in PACKAGES} <= set(lines)


@pytest.mark.parametrize("file", RAY_FILES, ids=lambda file: file.name)
def test_nothing_that_runs_commands_is_open(file: Path) -> None:
    config = yaml.safe_load(file.read_text())
    for key in ("head_start_ray_commands", "worker_start_ray_commands"):
        stop, start = config[key]
        assert stop == "ray stop"
        assert start.startswith("export RAY_AUTH_MODE=token")
        assert "--metrics-export-port=8080" in start
    assert "--dashboard-host=127.0.0.1" in config["head_start_ray_commands"][1]


def test_clouds_have_a_head_without_cpus_and_workers_with_gpus() -> None:
    for name in ("aws", "gcp"):
        config = yaml.safe_load((ROOT / "cluster" / "ray" / f"{name}.yaml").read_text())
        assert config["head_node_type"] == "head"
        types = config["available_node_types"]
        assert types["head"]["resources"] == {"CPU": 0}
        assert types["gpu"]["min_workers"] == 2


def test_the_clusters_differ_only_in_where_machines_come_from() -> None:
    """What is installed, copied and started is what was proven for machines that are there."""
    proven, *clouds = (yaml.safe_load(file.read_text()) for file in (ON_PREMISE, *RAY_FILES[:2]))
    for config in clouds:
        for key in ("file_mounts", "rsync_exclude", "worker_start_ray_commands"):
            assert config[key] == proven[key]
        assert config["setup_commands"][1:] == proven["setup_commands"]
        assert config["head_setup_commands"][1:] == proven["head_setup_commands"]
        start = proven["head_start_ray_commands"][1]
        for own in (" RAY_enable_autoscaler_v2=0", " --num-cpus=0 --num-gpus=0"):
            assert own in start
            start = start.replace(own, "")
        assert config["head_start_ray_commands"][1] == start


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("cluster_name: tandem", "cluster_name: 3", "cluster_name: 3 is not of type 'string'"),
        ("cluster_name: tandem", "cluster_name: ../x", "cluster_name: not a name; got '../x'; allowed: "
         "letters, digits, . _ and -"),
        ("head_ip: 10.0.0.1", "head_ip: ''", "provider.head_ip: not an address or name of a machine; got ''"),
        ("[10.0.0.2, 10.0.0.3]", "[10.0.0.2, -oProxyCommand=id]",
         "provider.worker_ips[1]: not an address or name of a machine; got '-oProxyCommand=id'"),
        ("[10.0.0.2, 10.0.0.3]", "[10.0.0.2, 10.0]", "provider.worker_ips[1]: not an address or name of a "
         "machine; got 10.0"),
        ("[10.0.0.2, 10.0.0.3]", "[10.0.0.2, 10.0.0.2]",
         "worker_ips[1]: the machine is given twice; got 10.0.0.2; first as provider.worker_ips[0]"),
        ("rsync_exclude", "rsync_exlude", "did you mean rsync_exclude?"),
        ("  head_ip: 10.0.0.1", "  head_i: 10.0.0.1",
         ": Ray does not take it: Please supply a `head_ip` and list of `worker_ips`. Alternatively, supply "
         "a `coordinator_address`."),
        ("export RAY_AUTH_MODE=token;", "true;", "worker_start_ray_commands[1]: Ray would take commands from "
         "anyone; begin the command with export RAY_AUTH_MODE=token;"),
        ("cluster_name: tandem", "cluster_name: on", "cluster_name: YAML readers do not agree on what this "
         "word means; got on; write true or false, or quote it"),
    ],
)  # fmt: skip
def test_mistakes_of_a_cluster_file(tmp_path: Path, old: str, new: str, said: str) -> None:
    (line,) = changed(tmp_path, ON_PREMISE, old, new)
    assert line.endswith(said)
    if not said.startswith(":"):
        place = line_of(ON_PREMISE, "export RAY_AUTH_MODE=token;" if "start_ray" in said else old)
        assert int(line.partition(":")[0]) in (place, place - 1)


def test_the_kuberay_file_is_the_cluster_s_deployment() -> None:
    assert check_cluster_file(read_file(SERVICE), str(SERVICE)) is FileKind.RAY_SERVICE
    manifest = yaml.safe_load(SERVICE.read_text())
    inside = yaml.safe_load(manifest["spec"]["serveConfigV2"])
    outside: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "cluster.yaml").read_text())
    outside["proxy_location"] = "EveryNode"
    http = outside["applications"][0]["args"]["router"]["http"]
    http["api_keys_file"] = "/etc/tandem/api-keys"
    assert inside == outside


def test_pods_find_what_the_deployment_names() -> None:
    cluster = yaml.safe_load(SERVICE.read_text())["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert {"name": "serve", "containerPort": 8000} in container["ports"]
        assert {"name": "metrics", "containerPort": 8080} in container["ports"]
        (mount,) = container["volumeMounts"]
        (volume,) = pod["volumes"]
        assert (mount["mountPath"], mount["name"]) == ("/etc/tandem", volume["name"])
        assert oct(volume["secret"]["defaultMode"]) == "0o440"  # the router refuses keys that others may read
        assert pod["securityContext"]["fsGroup"] == 1000


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("ray.io/v1", "ray.io/v1alpha1", "apiVersion: not what KubeRay reads; allowed: ray.io/v1"),
        ("serviceUnhealthySecondThreshold", "serviceUnhealthyThreshold",
         "spec.serviceUnhealthyThreshold: unknown key; got 'serviceUnhealthyThreshold'; allowed: "
         "deploymentUnhealthySecondThreshold, excludeHeadPodFromServeSvc, managedBy, rayClusterConfig, "
         "rayClusterDeletionDelaySeconds, serveConfigV2, serveService, serviceUnhealthySecondThreshold, "
         "suspend, upgradeStrategy; did you mean serviceUnhealthySecondThreshold?"),
        ("{mode: token}", "{mode: disabled}",
         "spec.rayClusterConfig.authOptions: Ray would take commands from anyone; allowed: {mode: token}"),
        ("minReplicas: 2", "priority: 2",
         "spec.rayClusterConfig.workerGroupSpecs[0].minReplicas: must be given"),
        ("max_surge_percent", "max_surge_percentage",
         "spec.serveConfigV2: applications[0].deployments[0].max_surge_percentage: unknown key"),
    ],
)  # fmt: skip
def test_mistakes_of_a_ray_service(tmp_path: Path, old: str, new: str, said: str) -> None:
    (line,) = changed(tmp_path, SERVICE, old, new)
    number, _, rest = line.partition(":")
    assert rest.startswith(said)
    if old != "minReplicas: 2":
        assert int(number) == line_of(SERVICE, old)


def test_a_service_without_a_deployment(tmp_path: Path) -> None:
    file = tmp_path / "service.yaml"
    file.write_text("apiVersion: ray.io/v1\nkind: RayService\nspec: {}\n")
    with pytest.raises(ConfigError) as caught:
        check_cluster_file(read_file(file), str(file))
    assert [problem.path for problem in caught.value.problems] == [
        "spec.rayClusterConfig",
        "spec.serveConfigV2",
    ]


@pytest.mark.parametrize(
    ("file", "kind"), [(ON_PREMISE, "cluster of `ray up`"), (SERVICE, "RayService of KubeRay")]
)
def test_validate_says_what_it_recognised(world: World, file: Path, kind: str) -> None:
    done = world.run("validate", str(file))
    assert (done.exit_code, done.stdout) == (0, f"{file}: a valid {kind}\n")
    done = world.run("validate", str(file), "--json")
    assert json.loads(done.stdout) == {"valid": True, "file": str(file), "kind": kind}


def places_of(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a tree but its root."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = [(*path, key) for key, _ in items]
    return found + [deep for place in found for deep in places_of(value[place[-1]], place)]


@pytest.mark.parametrize("odd", [None, True, -1, "x", [1], {"a": 1}], ids=repr)
def test_no_value_breaks_what_takes_it_for_another(odd: object) -> None:
    for file in (ON_PREMISE, ROOT / "cluster" / "ray" / "aws.yaml", SERVICE):
        for place in places_of(yaml.safe_load(file.read_text())):
            tree = read_file(file)
            holder = tree.value
            for part in place[:-1]:
                holder = holder[part]
            holder[place[-1]] = odd
            try:
                check_cluster_file(tree, str(file))
            except ConfigError as error:
                assert all(problem.message for problem in error.problems)
