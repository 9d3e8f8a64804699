"""Deployments that cannot work end in DEPLOY_FAILED with one sentence, and leave the cluster usable."""

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
        ({"pools": {"unified": {"tensor_parallel": 64}}}, ["pools.unified.tensor_parallel", "64", "CPU"]),
        ({"model": {"path": "/nowhere/model"}}, ["model.path", "/nowhere/model", "does not exist"]),
        ({"router": {"http": {"text_threads": 0}}}, ["router.http.text_threads", "out of range", "least 1"]),
        (
            {"router": {"http": {"api_keys_file": "/nowhere/keys"}}},
            ["router.http.api_keys_file", "No such file"],
        ),
        ({"model": {"path": "a/model"}}, ["model.path", "a/model", "no absolute path"]),
    ],
)
def test_a_mistake_is_one_sentence_in_the_status(
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
        assert [word for word in words if word not in message] == []
        assert "Traceback" not in message
    finally:
        remove(cluster)
