"""Every query of every page over a real run: prefill and decode apart under scripted load, scraped by a real
Prometheus through Ray's service discovery. `make test-dashboards` runs it, for some minutes."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from cluster.cli.metrics import through_ray
from cluster.launch.local_cluster import LocalCluster
from cluster.launch.ports import free_port
from cluster.observe.answers import Range, ask
from cluster.observe.local_prometheus import find_program, running
from cluster.observe.preview import preview
from cluster.observe.prometheus_api import PrometheusApi
from dashboards import ray_series
from dashboards.pages import PAGES
from tests.integration.serving import Serving, serving, tiny_llama, wait_for

PROMETHEUS = find_program("prometheus")
pytestmark = [
    pytest.mark.integration,
    pytest.mark.dashboards,
    pytest.mark.timeout(900),
    pytest.mark.skipif(PROMETHEUS is None, reason="Prometheus is not here: apt install prometheus"),
]
COMPLETIONS: Final = "/v1/completions"
LOAD_S: Final = 120.0
NUM_CLIENTS: Final = 4
NUM_BLOCKS: Final = 192  # of each pool: few enough that blocks are evicted
NEEDS_GPU: Final = (ray_series.GPU_USE, ray_series.GPU_MEMORY, ray_series.GPU_POWER)


@pytest.fixture(scope="module")
def server(
    cluster: LocalCluster, http_port: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Serving]:
    folder = tiny_llama(tmp_path_factory.mktemp("llama"), 2048)
    settings = [f"model.path={folder}", "model.dtype=float32"]
    settings += ["router.placement.interference_weight=1000", "router.placement.transfer_ms=0"]
    settings += ["router.http.goodput_ttft_s=10"]
    for pool in ("prefill", "decode"):
        settings += [
            f"pools.{pool}.cache.num_blocks={NUM_BLOCKS}",
            f"pools.{pool}.parallel.threads_per_rank=1",
        ]
    with serving(cluster, http_port, "local-disaggregated.yaml", settings) as server:
        yield server


async def load(server: Serving, until: float) -> None:
    """Shared and new prompts, some refused, some given up by their clients."""
    model = server.model
    shared = [random.Random(seed).choices(range(97, 123), k=300) for seed in range(3)]

    async def one(client: httpx.AsyncClient, number: int, turn: int) -> None:
        rng = random.Random(number * 10_000 + turn)
        prompt = shared[turn % 3] + rng.choices(range(97, 123), k=rng.choice((20, 200, 700)))
        body: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": 24, "ignore_eos": True}
        if turn % 7 == 0:
            body["n"] = 0  # refused
        try:
            async with asyncio.timeout(0.1 if turn % 5 == 0 else 60.0):  # some leave
                await client.post(server.url + COMPLETIONS, json={**body, "stream": turn % 2 == 0})
        except TimeoutError:
            pass

    async def keep(client: httpx.AsyncClient, number: int) -> None:
        turn = 0
        while time.monotonic() < until:
            turn += 1
            await one(client, number, turn)

    async with httpx.AsyncClient(trust_env=False, timeout=60.0) as client:
        await asyncio.gather(*(keep(client, number) for number in range(NUM_CLIENTS)))


def test_no_panel_is_empty_over_a_real_run(server: Serving, tmp_path: Path) -> None:
    assert PROMETHEUS is not None
    config = through_ray(server.cluster.api.url, server.cluster.api.token)
    with running(PROMETHEUS, config, port=free_port()) as prometheus:
        api = PrometheusApi(prometheus.url)
        wait_for(lambda: _is_scraped(api), 120.0, "no series of ours has come through Ray")
        asyncio.run(load(server, time.monotonic() + LOAD_S))
        end = time.time()
        times = Range(start=end - LOAD_S, end=end, step_s=5.0)
        html, _ = preview(api, PAGES.values(), times)
        (tmp_path / "preview.html").write_text(html, encoding="utf-8")
        wrong = [
            f"{page.uid}: {panel.title}: {answer.problem}: {answer.expr}"
            for page in PAGES.values()
            for panel in page.panels
            for answer in ask(api, panel, times)
            if answer.problem and not any(name in answer.expr for name in NEEDS_GPU)
        ]
    assert wrong == []


def _is_scraped(api: PrometheusApi) -> bool:
    now = time.time()
    return bool(api.query_range("tandem_engine_up", start=now, end=now, step_s=1.0))
