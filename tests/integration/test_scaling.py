"""More and fewer groups by another num_replicas, and a group that is killed: streams go on, with the tokens
they would have had."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from cluster.launch.handover import deploy, wait_ready
from cluster.launch.local_cluster import LocalCluster
from tests.integration.serving import APPLICATION, Serving, config_of, serving, tiny_llama, wait_for
from tests.integration.streams import answer_of, body_of, streaming

pytestmark = pytest.mark.integration

FILE = "local-two-groups.yaml"
NUM_STREAMS, MAX_TOKENS = 8, 600
SCALED_S = 60.0


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A tiny model, small caches, and a grace period that is shorter than the streams."""
    folder = tiny_llama(tmp_path_factory.mktemp("llama"), 4096)
    # In turn, so that each group gets its share of prompts that others have cached.
    settings = [f"model.path={folder}", "model.dtype=float32", "router.policy=round_robin"]
    settings += ["pools.unified.cache.num_blocks=1500", "pools.unified.parallel.threads_per_rank=1"]
    return [*settings, "pools.unified.drain_timeout_s=0.5"]


@pytest.fixture(scope="module")
def server(cluster: LocalCluster, http_port: int, settings: list[str]) -> Iterator[Serving]:
    with serving(cluster, http_port, FILE, settings, unified=1) as server:
        yield server


@pytest.fixture(scope="module")
def bodies() -> list[dict[str, Any]]:
    return [body_of(number, MAX_TOKENS) for number in range(NUM_STREAMS)]


@pytest.fixture(scope="module")
def expected(server: Serving, bodies: list[dict[str, Any]]) -> list[list[int]]:
    """What one group answers when it is asked for one after the other."""
    return [answer_of(server, body) for body in bodies]


def scale(server: Serving, port: int, settings: list[str], num_groups: int) -> None:
    deploy(server.cluster.api, config_of(FILE, port, settings, unified=num_groups))
    wait_ready(server.cluster.api, application=APPLICATION, url=server.url, timeout_s=SCALED_S)


def ready(server: Serving) -> list[dict[str, Any]]:
    return [group for group in server.groups() if group["ready"]]


def test_one_group_to_three_and_back_under_eight_streams(
    server: Serving,
    http_port: int,
    settings: list[str],
    bodies: list[dict[str, Any]],
    expected: list[list[int]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    with streaming(server, bodies, expected) as seen:
        wait_for(lambda: seen.num_tokens > 1000, 30.0, "nothing streams")
        scale(server, http_port, settings, 3)
        wait_for(lambda: len(ready(server)) == 3, SCALED_S, "no three groups")
        wait_for(lambda: all(group["running"] for group in ready(server)), 30.0, "a group has no work")
        busy = {group["group"] for group in ready(server)}
        scale(server, http_port, settings, 1)
        wait_for(lambda: len(server.groups()) == 1, SCALED_S, "groups do not go away")
        time.sleep(1.0)
    with capsys.disabled():
        print(f"\n{seen.num_right} streams right, {len(seen.wrong)} not; groups that worked: {len(busy)}")
    assert seen.wrong == []
    assert len(busy) == 3
    assert seen.num_right >= NUM_STREAMS


def test_streams_of_a_group_that_is_killed_go_on_in_another(
    server: Serving,
    http_port: int,
    settings: list[str],
    bodies: list[dict[str, Any]],
    expected: list[list[int]],
) -> None:
    scale(server, http_port, settings, 2)
    wait_for(lambda: len(ready(server)) == 2, SCALED_S, "no two groups")
    victim = ready(server)[0]["group"]
    (pid,) = server.rank_pids(victim)
    with streaming(server, bodies, expected) as seen:
        wait_for(
            lambda: any(g["group"] == victim and g["running"] > 1 for g in ready(server)), 30.0, "it is idle"
        )
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: victim not in {group["group"] for group in ready(server)}, 30.0, "it is not missed")
        wait_for(lambda: len(ready(server)) == 2, SCALED_S, "the group was not rebuilt")
    assert seen.wrong == []
