"""deploy/local-disaggregated-tp.yaml: prompts computed by one rank, answered by two; what clients see when
the prefill group is killed, and what is left when they leave."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from cluster.launch.local_cluster import LocalCluster
from cluster.models import embedded
from tests.integration.serving import Serving, serving, wait_for
from tests.models.oracle import Oracle
from workers.types import Role

pytestmark = pytest.mark.integration

REBUILD_S = 60.0
LENGTHS = (15, 16, 17, 200)  # tokens; blocks have 16


@pytest.fixture(scope="module")
def server(cluster: LocalCluster, http_port: int) -> Iterator[Serving]:
    settings = ["model.dtype=float32", "model.max_model_len=1024", "router.policy=round_robin"]
    for pool in ("prefill", "decode"):
        settings += [f"pools.{pool}.parallel.threads_per_rank=1", f"pools.{pool}.cache.num_blocks=128"]
    with serving(cluster, http_port, "local-disaggregated-tp.yaml", settings) as server:
        wait_for(lambda: sum(g["ready"] for g in server.groups()) == 2, 30.0, "two groups are not ready")
        yield server


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle(embedded.ensure(print))


def body_of(server: Serving, prompt: list[int], **more: Any) -> dict[str, Any]:
    body = {"model": server.model, "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    return {**body, "return_token_ids": True, **more}


def group(server: Serving, role: Role) -> dict[str, Any]:
    (found,) = [group for group in server.groups() if group["role"] == role.value and group["ready"]]
    return found


def prompt_of(seed: int, length: int) -> list[int]:
    return [1000 + (seed * 7919 + i * 31) % 20_000 for i in range(length)]


@pytest.mark.parametrize("length", LENGTHS)
def test_answers_are_those_of_transformers_at_every_edge_of_a_block(
    server: Serving, oracle: Oracle, length: int
) -> None:
    prompt = prompt_of(length, length)
    expected = oracle.greedy(prompt, 8)
    before = server.counts()
    for turn, cached in enumerate((0, (length - 1) // 16 * 16)):
        answer = server.post("/v1/completions", body_of(server, prompt)).json()
        assert answer["choices"][0]["token_ids"] == expected, turn
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
    pulled = server.counts()["tandem_kv_pulled_tokens_total"] - before["tandem_kv_pulled_tokens_total"]
    assert pulled == (length - 1) // 16 * 16  # the first time; afterwards they were there


def test_a_prefill_group_that_is_killed_costs_time_and_no_answer(server: Serving, oracle: Oracle) -> None:
    prompt = prompt_of(9, 900)
    expected = oracle.greedy(prompt, 8)
    victim = group(server, Role.PREFILL)
    (pid,) = server.rank_pids(victim["group"])
    with ThreadPoolExecutor(1) as pool:
        answering = pool.submit(server.post, "/v1/completions", body_of(server, prompt))
        wait_for(lambda: group(server, Role.PREFILL)["running"] == 1, 10.0, "the prompt is not computed")
        os.kill(pid, signal.SIGKILL)
        answer = answering.result(60.0).json()
    assert answer["choices"][0]["token_ids"] == expected
    (shown,) = server.get(f"/explain/{answer['id']}").json()["prompts"]
    assert (shown["fetch"]["source"], shown["num_attempts"]) == (None, 1)
    assert shown["fetch"]["prefills"] == [{"group": victim["group"], "outcome": "crashed"}]
    wait_for(lambda: server.get("/ready").status_code == 200, REBUILD_S, "the group was not rebuilt")
    wait_for(server.is_idle, 10.0, "blocks are held")
    answer = server.post("/v1/completions", body_of(server, prompt_of(10, 200))).json()
    assert answer["choices"][0]["token_ids"] == oracle.greedy(prompt_of(10, 200), 8)


def test_clients_that_leave_during_the_hand_over_leave_nothing_behind(server: Serving) -> None:
    delays_s = (0.0, 0.005, 0.02, 0.05, 0.1, 0.3)

    async def leave(client: httpx.AsyncClient, number: int) -> None:
        body = body_of(server, prompt_of(100 + number, 200), max_tokens=200, stream=True)
        try:
            async with asyncio.timeout(delays_s[number % len(delays_s)]):
                await client.post(f"{server.url}/v1/completions", json=body)
        except TimeoutError:
            pass

    async def leave_all() -> None:
        async with httpx.AsyncClient(trust_env=False, timeout=30.0) as client:
            for start in range(0, 60, 10):
                await asyncio.gather(*(leave(client, number) for number in range(start, start + 10)))

    asyncio.run(leave_all())
    wait_for(server.is_idle, 20.0, "blocks are held")
    big = server.post("/v1/completions", body_of(server, prompt_of(7, 1000)))
    assert big.status_code == 200, big.text
    wait_for(server.is_idle, 10.0, "blocks are held")
