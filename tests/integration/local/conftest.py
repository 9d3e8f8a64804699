"""deploy/local.yaml with two routers and the embedded model, deployed once for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from cluster.launch.local_cluster import LocalCluster
from tests.integration.local.raw import GET, Answer, ask
from tests.integration.serving import Serving, serving


@pytest.fixture(scope="package")
def server(cluster: LocalCluster, http_port: int) -> Iterator[Serving]:
    with serving(cluster, http_port, "local.yaml", ["model.dtype=float32"], router=2) as server:
        yield server


@pytest.fixture(scope="package", autouse=True)
def unended(server: Serving) -> Iterator[Future[Answer]]:
    """The answer to a request without an end. It takes ten seconds, in which other tests run."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(ask, server, GET)
