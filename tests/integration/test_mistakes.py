"""Deployments that cannot work end in DEPLOY_FAILED and say why, and leave the cluster usable."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from cluster.launch.errors import LaunchError
from cluster.launch.handover import deploy, wait_ready
from cluster.launch.local_cluster import LocalCluster
from tests.integration.serving import APPLICATION, config_of, remove

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"pools": {"unified": {"tensor_paralel": 2}}}, ["tensor_paralel", "did you mean tensor_parallel?"]),
        ({"model": {"path": "/nowhere/model"}}, ["model.path", "/nowhere/model", "does not exist"]),
        (
            {
                "pools": {"unified": {"tensor_parallel": 64}},
                "router": {"http": {"api_keys_file": "/nowhere/keys"}},
            },
            [
                *("pools.unified.tensor_parallel", "64", "CPU"),
                *("router.http.api_keys_file", "No such file"),
            ],
        ),
    ],
    ids=["a key", "a folder", "a size and a file"],
)
def test_mistakes_are_sentences_in_the_status(
    cluster: LocalCluster, http_port: int, args: dict[str, Any], words: list[str]
) -> None:
    config = copy.deepcopy(config_of("local.yaml", http_port, []))
    config["applications"][0]["args"] = args
    deploy(cluster.api, config)
    try:
        with pytest.raises(LaunchError) as caught:
            wait_ready(
                cluster.api, application=APPLICATION, url=f"http://127.0.0.1:{http_port}", timeout_s=60.0
            )
        message = str(caught.value)
        assert message.startswith("deployment failed: ")
        assert [word for word in words if word not in message] == [], message
        assert "Traceback" not in message
    finally:
        remove(cluster)
