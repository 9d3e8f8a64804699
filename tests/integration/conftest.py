"""One Ray cluster for all integration tests; each module deploys on it what it needs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.launch.local_cluster import LocalCluster, start_local_cluster, stop_all
from cluster.launch.ports import free_port


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """A cluster with two logical CPUs and its own token; nothing of it is left afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path_factory.mktemp("ray") / "token"))
        patch.delenv("RAY_AUTH_TOKEN", raising=False)
        patch.setenv(
            "PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
        )
        cluster = start_local_cluster(num_cpus=2, dashboard_port=free_port())
        try:
            yield cluster
        finally:
            killed = stop_all(cluster)
        assert killed == [], "processes that did not end by themselves"


@pytest.fixture(scope="session")
def http_port() -> int:
    """Serve listens on the port of its first start for as long as it runs."""
    return free_port()
