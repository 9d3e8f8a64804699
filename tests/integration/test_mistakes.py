"""Deployments that cannot work end in DEPLOY_FAILED and say why, and leave the cluster usable."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from cluster.launch.errors import LaunchError
from cluster.launch.handover import deploy, wait_ready
from cluster.launch.local_cluster import LocalCluster
from tests.integration.serving import config_of, remove

pytestmark = pytest.mark.integration


# What goes wrong in three stages of building, and words of what is said of it.
MISTAKES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "a key": (
        {"pools": {"unified": {"tensor_paralel": 2}}},
        ["tensor_paralel", "did you mean tensor_parallel?"],
    ),
    "a folder": (
        {"model": {"path": "/nowhere/model"}},
        ["model.path", "/nowhere/model", "does not exist"],
    ),
    "a size and a file": (
        {
            "pools": {"unified": {"tensor_parallel": 64}},
            "router": {"http": {"api_keys_file": "/nowhere/keys"}},
        },
        ["pools.unified.tensor_parallel", "64", "CPU", "router.http.api_keys_file", "No such file"],
    ),
}


@pytest.fixture(scope="module")
def deployed(cluster: LocalCluster, http_port: int) -> Iterator[LocalCluster]:
    """All at once: an application each."""
    config = config_of("local.yaml", http_port, [])
    (app,) = config["applications"]
    config["applications"] = [
        {**app, "name": name, "route_prefix": f"/{number}", "args": args}
        for number, (name, (args, _)) in enumerate(MISTAKES.items())
    ]
    deploy(cluster.api, config)
    yield cluster
    remove(cluster)


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_sentences_in_the_status(deployed: LocalCluster, http_port: int, name: str) -> None:
    with pytest.raises(LaunchError) as caught:
        wait_ready(deployed.api, application=name, url=f"http://127.0.0.1:{http_port}", timeout_s=60.0)
    message = str(caught.value)
    assert message.startswith("deployment failed: ")
    assert [word for word in MISTAKES[name][1] if word not in message] == [], message
    assert "Traceback" not in message
