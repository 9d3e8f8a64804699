"""Updates under load: a good one, one that crashes in a loop, one that never gets its machines, and the way
back after each. `make test-scale` runs this: groups that fail are tried three times."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from cluster.launch.errors import LaunchError
from cluster.launch.handover import deploy, wait_ready
from cluster.launch.local_cluster import LocalCluster
from tests.integration.serving import APPLICATION, Serving, config_of, serving, tiny_llama
from tests.integration.streams import answer_of, body_of

pytestmark = [pytest.mark.integration, pytest.mark.scale]

FILE = "local-two-groups.yaml"
NUM_REQUESTS, AT_ONCE = 500, 6
READY_S = 240.0


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tiny_llama(tmp_path_factory.mktemp("llama"), 4096)
    settings = [f"model.path={folder}", "model.dtype=float32", "pools.unified.parallel.threads_per_rank=1"]
    return [*settings, "pools.unified.cache.num_blocks=1500", "pools.unified.drain_timeout_s=2"]


@pytest.fixture(scope="module")
def server(cluster: LocalCluster, http_port: int, settings: list[str]) -> Iterator[Serving]:
    with serving(cluster, http_port, FILE, settings) as server:
        yield server


class Load:
    """Requests one after the other, spread over the whole of an update."""

    def __init__(self, server: Serving) -> None:
        self._server = server
        self._bodies = [body_of(number, 40) for number in range(8)]
        self._right = [answer_of(server, body) for body in self._bodies]
        self.is_over = False

    def run(self, pool: ThreadPoolExecutor) -> list[str]:
        """NUM_REQUESTS at least, and on until `is_over`; what went wrong."""
        wrong: list[str] = []
        number = 0
        while number < NUM_REQUESTS or not self.is_over:
            batch = [pool.submit(self._ask, number + i) for i in range(AT_ONCE)]
            wrong += [problem for problem in (asked.result(timeout=120.0) for asked in batch) if problem]
            number += AT_ONCE
        return wrong

    def _ask(self, number: int) -> str:
        place = number % len(self._bodies)
        answer = self._server.post("/v1/completions", self._bodies[place], timeout_s=120.0)
        if answer.status_code != 200:
            return f"{answer.status_code} {answer.text[:300]}"
        tokens = answer.json()["choices"][0]["token_ids"]
        return "" if tokens == self._right[place] else f"other tokens: {tokens}"


def update(server: Serving, config: dict[str, Any]) -> None:
    deploy(server.cluster.api, config)
    wait_ready(server.cluster.api, application=APPLICATION, url=server.url, timeout_s=READY_S)


def state_of(server: Serving) -> str:
    status: str = server.cluster.api.details()["applications"][APPLICATION]["status"]
    return status


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["good", "crashing", "waiting"])
def test_no_request_fails_during_an_update(
    server: Serving, http_port: int, settings: list[str], kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = {
        "good": ["pools.unified.schedule.max_running=17"],
        "crashing": ["pools.unified.start_timeout_s=1"],  # none starts as fast
        "waiting": ["pools.unified.cpus_per_rank=64", "pools.unified.wait_for_resources=true"],
    }[kind]
    load = Load(server)
    began = time.monotonic()
    with ThreadPoolExecutor(AT_ONCE + 1) as pool:
        asking = pool.submit(load.run, pool)
        new = config_of(FILE, http_port, [*settings, *changed])
        if kind == "good":
            update(server, new)
        elif kind == "crashing":
            with pytest.raises(LaunchError, match="deployment failed"):
                update(server, new)
        else:
            deploy(server.cluster.api, new)
            time.sleep(15.0)
            assert state_of(server) == "DEPLOYING"
        if kind != "good":
            update(server, config_of(FILE, http_port, settings))  # back
        load.is_over = True
        wrong = asking.result(timeout=600.0)
    with capsys.disabled():
        print(f"\n{kind}: {len(wrong)} failed, {time.monotonic() - began:.0f} s")
    assert wrong == []
