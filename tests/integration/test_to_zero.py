"""A pool that ends its last group when nothing comes, and starts one for the request that comes then."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from cluster.launch.handover import deploy, wait_ready
from cluster.launch.local_cluster import LocalCluster
from tests.integration.serving import APPLICATION, Serving, config_of, remove, tiny_llama, wait_for
from tests.integration.streams import answer_of, body_of

pytestmark = [pytest.mark.integration, pytest.mark.scale]

FILE = "local-autoscaled.yaml"
AT_ONCE = 6
IDLE_S, GONE_S, BACK_S = 5.0, 90.0, 120.0


@pytest.fixture(scope="module")
def server(
    cluster: LocalCluster, http_port: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Serving]:
    folder = tiny_llama(tmp_path_factory.mktemp("llama"), 4096)
    settings = [f"model.path={folder}", "model.dtype=float32", "pools.unified.parallel.threads_per_rank=1"]
    settings += [f"router.http.group_wait_s={BACK_S:g}", f"scaling.idle_to_zero_s={IDLE_S:g}"]
    config = config_of(FILE, http_port, settings)
    pool = next(part for part in config["applications"][0]["deployments"] if part["name"] == "unified")
    pool["autoscaling_config"] |= {"min_replicas": 0, "initial_replicas": 1, "max_replicas": 1}
    url = f"http://127.0.0.1:{http_port}"
    deploy(cluster.api, config)
    try:
        wait_ready(cluster.api, application=APPLICATION, url=url, timeout_s=BACK_S)
        yield Serving(cluster, url)
    finally:
        remove(cluster)


@pytest.mark.timeout(600)
def test_to_zero_and_back(server: Serving, capsys: pytest.CaptureFixture[str]) -> None:
    bodies = [body_of(number, 40) for number in range(AT_ONCE)]
    right = [answer_of(server, body) for body in bodies]
    for _ in range(2):
        began = time.monotonic()
        wait_for(lambda: not server.groups(), GONE_S, "the idle group is still there")
        gone_s = time.monotonic() - began
        assert server.get("/ready").status_code == 200  # whoever asks will be answered
        began = time.monotonic()
        with ThreadPoolExecutor(AT_ONCE) as pool:
            found = list(pool.map(lambda body: _tokens(server, body), bodies))
        assert found == right
        with capsys.disabled():
            print(
                f"\nno group after {gone_s:.0f} s; {AT_ONCE} answers {time.monotonic() - began:.0f} s later"
            )


def _tokens(server: Serving, body: dict[str, Any]) -> list[int]:
    answer = server.post("/v1/completions", body, timeout_s=BACK_S)
    assert answer.status_code == 200, answer.text
    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
    return tokens
