"""deploy/local-tp2.yaml: ranks as processes, and what clients see when one of them is killed."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator

import httpx
import pytest

from cluster.launch.local_cluster import LocalCluster
from cluster.models import embedded
from tests.integration.serving import Serving, processes, serving, wait_for
from tests.models.oracle import Oracle

pytestmark = pytest.mark.integration

REBUILD_S = 60.0  # on a busy machine; 16 s on an idle one
RANK = "ray::RankActor"


@pytest.fixture(scope="module")
def server(cluster: LocalCluster, http_port: int) -> Iterator[Serving]:
    settings = ["model.dtype=float32", "pools.unified.parallel.threads_per_rank=1"]
    settings += ["pools.unified.cache.num_blocks=600"]
    with serving(cluster, http_port, "local-tp2.yaml", settings) as server:
        yield server


def test_two_ranks_give_the_tokens_of_transformers(server: Serving) -> None:
    prompt = list(range(100, 140))
    expected = Oracle(embedded.ensure(print)).greedy(prompt, 12)
    body = {"model": server.model, "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    answer = server.post("/v1/completions", {**body, "return_token_ids": True})
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["token_ids"] == expected


@pytest.mark.parametrize("victim", [1, 0])
def test_a_killed_rank_is_replaced_and_its_requests_go_on(server: Serving, victim: int) -> None:
    mark = server.cluster.mark
    ranks = processes(mark, RANK)
    assert len(ranks) == 2
    (group,) = [group for group in server.groups() if group["ready"]]
    pid = server.rank_pids(group["group"])[victim]
    assert pid in ranks
    body = {"model": server.model, "prompt": "Once upon a time", "max_tokens": 60, "ignore_eos": True}
    body |= {"temperature": 0, "return_token_ids": True}
    lines = []
    killed = 0.0
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json={**body, "stream": True}, timeout=90.0, trust_env=False
    ) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: "):
                lines.append(line.removeprefix("data: "))
            if len(lines) == 5 and not killed:
                os.kill(pid, signal.SIGKILL)
                killed = time.monotonic()
    assert killed
    assert lines[-1] == "[DONE]"
    choices = [choice for line in lines[:-1] for choice in json.loads(line)["choices"]]
    tokens = [token for choice in choices for token in choice.get("token_ids") or ()]
    wait_for(lambda: not set(ranks) & set(processes(mark, RANK)), 10.0, "ranks of the broken group live on")
    wait_for(lambda: server.get("/ready").status_code == 200, REBUILD_S, "the group was not rebuilt")
    assert time.monotonic() - killed < REBUILD_S
    assert len(processes(mark, RANK)) == 2
    answer = server.post("/v1/completions", body)
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["token_ids"] == tokens

    wait_for(server.is_idle, 5.0, "the new group holds something")  # its load is told some milliseconds late
