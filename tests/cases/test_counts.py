"""Counts that add up: two router replicas, one directory, two engines that run one request each."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from router.build import build_service
from router.dispatch.interface import GroupState
from router.http.app import create_app
from router.serving.service import Service
from router.settings import RouterSettings
from router.telemetry.publisher import MetricsPublisher
from router.text.tokenizer import TextTokenizer
from tests.cases.serving import MODEL, LocalDispatcher, endless_letters, running_engine
from tests.dispatcher_double import DispatcherDouble
from tests.unit.router.boards import LocalBoard
from tests.unit.router.client import COMPLETIONS, until
from tests.unit.router.scrapes import samples
from workers.types import GenerateRequest, TokenChunk

NUM_PROMPT_TOKENS = 3
LONG = {"prompt": "abc", "max_tokens": 30_000, "ignore_eos": True, "stream": True}
PERIOD_S = 0.05  # of publishing
Page = dict[tuple[str, tuple[tuple[str, str], ...]], float]  # of `/metrics`: values by name and labels


class TwoEngines(DispatcherDouble):
    """Takes the engine with fewer requests."""

    def __init__(self, engines: Sequence[LocalDispatcher]) -> None:
        self.engines = engines

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """See `Dispatcher`."""
        engine = min(self.engines, key=lambda engine: engine.num_open)
        async for chunk in engine.generate(request):
            yield chunk

    def groups(self) -> Sequence[GroupState]:
        """See `Dispatcher`."""
        return [state for engine in self.engines for state in engine.groups()]


class Replicas:
    """Two routers over both engines."""

    def __init__(self, engines: Sequence[LocalDispatcher], folder: Path) -> None:
        self.engines = engines
        self.services: list[Service] = []
        self.clients: list[httpx.AsyncClient] = []
        self.telemetries: list[MetricsPublisher] = []
        self._dispatcher = TwoEngines(engines)
        self._tokenizer = TextTokenizer.load(folder)

    @asynccontextmanager
    async def served(self) -> AsyncIterator[None]:
        """Both on loopback ports, publishing to one directory, on this event loop."""
        board = LocalBoard()
        async with AsyncExitStack() as stack:
            for name in ("r1", "r2"):
                settings = RouterSettings(model_name=MODEL, replica=name)
                service = build_service(self._dispatcher, self._tokenizer, settings)
                stack.callback(service.close)
                telemetry = MetricsPublisher(service.metrics, board, period_s=PERIOD_S)
                self.services.append(service)
                self.telemetries.append(telemetry)
                url = await stack.enter_async_context(
                    listening(create_app(service, settings, telemetry=telemetry))
                )
                await telemetry.start()
                stack.push_async_callback(telemetry.stop)
                client = httpx.AsyncClient(base_url=url, timeout=30, trust_env=False)
                self.clients.append(await stack.enter_async_context(client))
            yield

    @property
    def num_first_tokens(self) -> int:
        """TTFT samples of both."""
        return sum(sum(service.metrics.ttft_s.counts) for service in self.services)

    @property
    def sum_ttft_s(self) -> float:
        """TTFT of all requests of both."""
        return sum(service.metrics.ttft_s.total for service in self.services)

    async def post(self, number: int, **fields: Any) -> httpx.Response:
        """A completion by the routers in turn."""
        return await self.clients[number % 2].post(COMPLETIONS, json={"prompt": "abc", **fields})

    @asynccontextmanager
    async def streaming(self, number: int) -> AsyncIterator[None]:
        """A long answer with its first token here; leaving the block leaves the answer."""
        async with self.clients[number % 2].stream("POST", COMPLETIONS, json=LONG) as response:
            lines = response.aiter_lines()  # closing it would close the connection
            await anext(lines)
            yield

    async def scrape(self, number: int) -> str:
        """`/metrics` of the routers in turn."""
        return (await self.clients[number % 2].get("/metrics")).text

    async def idle(self) -> None:
        """Returns when no request runs, and every replica has published since."""
        await until(lambda: not any(service.admission.num_inflight for service in self.services))
        await until(lambda: not any(e.stats.num_running + e.stats.num_waiting for e in self.engines))
        await asyncio.sleep(3 * PERIOD_S)


@asynccontextmanager
async def listening(app: Any) -> AsyncIterator[str]:
    """The application behind uvicorn on this event loop; gives its base URL."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", lifespan="off"))
    task = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await asyncio.wait_for(task, 10)


@pytest.fixture
def replicas(tmp_path: Path) -> Iterator[Replicas]:
    """Both engines say d, e, f ... z, a ... after "abc", for ever; one request at a time each."""
    folder = endless_letters(tmp_path)
    with engine(folder, "g1") as one, engine(folder, "g2") as two:
        yield Replicas([one, two], folder)


@contextmanager
def engine(folder: Path, group: str) -> Iterator[LocalDispatcher]:
    with running_engine(folder, group=group, max_running=1, num_blocks=2049) as (dispatcher, _, _):
        yield dispatcher


def total(page: Page, name: str, **labels: str) -> float:
    """The sum over a name's series that have these labels, as a dashboard would count."""
    found = [
        value
        for (series, own), value in page.items()
        if series == f"tandem_{name}" and labels.items() <= dict(own).items()
    ]
    assert found, name
    return sum(found)


def test_counts_add_up(replicas: Replicas) -> None:
    async def run() -> tuple[list[str], Counter[str]]:
        usage: Counter[str] = Counter()
        async with replicas.served():
            # 12 that finish: two occupy both engines, the third waits behind one for a measured time.
            running = [asyncio.create_task(replicas.post(i, max_tokens=300)) for i in range(2)]
            await until(lambda: replicas.num_first_tokens == 2)
            before_s = replicas.sum_ttft_s
            queued = asyncio.create_task(replicas.post(0, max_tokens=5))
            await until(lambda: sum(e.stats.num_waiting for e in replicas.engines) == 1)
            since = time.monotonic()
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            waited_s = time.monotonic() - since
            answers = [*await asyncio.gather(*running), await queued]
            assert replicas.num_first_tokens == 3
            assert (
                replicas.sum_ttft_s - before_s >= 0.9 * waited_s
            )  # the engine ended a moment before we saw it
            more = [replicas.post(i, max_tokens=5) for i in range(3)]
            stops = [replicas.post(i, max_tokens=40, stop="fgh") for i in range(6)]
            answers += await asyncio.gather(*more, *stops)
            for answer in answers:
                usage.update(
                    {name: answer.json()["usage"][name] for name in ("prompt_tokens", "completion_tokens")}
                )
            # 2 that are refused.
            assert [(await replicas.post(i, max_tokens=0)).status_code for i in range(2)] == [400, 400]
            # 4 that leave after their first token, 2 that leave while those occupy both engines.
            for i in range(2):
                async with replicas.streaming(i):
                    await asyncio.sleep(0.05)
            await replicas.idle()
            async with replicas.streaming(0), replicas.streaming(1):
                left = [asyncio.create_task(replicas.post(i, max_tokens=3)) for i in range(2)]
                await until(lambda: sum(e.stats.num_waiting for e in replicas.engines) == 2)
                for task in left:
                    task.cancel()
                await asyncio.gather(*left, return_exceptions=True)
            await replicas.idle()
            texts = [await replicas.scrape(i) for i in range(10)]
        return texts, usage

    texts, usage = asyncio.run(asyncio.wait_for(run(), 120))
    pages = [samples(text) for text in texts]
    for page in pages:
        reasons = {
            reason: total(page, "requests_total", reason=reason) for reason in ("stop", "length", "aborted")
        }
        assert reasons == {"stop": 6, "length": 6, "aborted": 6}
        assert total(page, "requests_total") == 18
        assert (
            total(page, "client_errors_total")
            == total(page, "client_errors_total", code="invalid_value")
            == 2
        )
        assert total(page, "server_errors_total") == total(page, "telemetry_failures_total") == 0
        assert total(page, "ttft_seconds_count") == 16
        assert total(page, "e2e_seconds_count") == 18
        assert total(page, "prompt_tokens_total") == usage["prompt_tokens"] + 6 * NUM_PROMPT_TOKENS
        # An engine may be a few tokens ahead of what it could still deliver to those that left.
        delivered = total(page, "generation_tokens_total")
        assert usage["completion_tokens"] + 4 <= delivered <= total(page, "engine_generated_tokens_total")
        assert total(page, "engine_running") == total(page, "engine_waiting") == 0
        assert total(page, "engine_up") == 2
    check_series(pages)


def check_series(pages: list[Page]) -> None:
    """Labels and buckets are right; no series falls, comes or goes."""
    for page in pages:
        rows: dict[tuple[str, tuple[tuple[str, str], ...]], list[float]] = {}
        for (name, labels), value in page.items():
            own = dict(labels)
            assert own["model"] == MODEL
            assert own.keys() & {"replica", "group"}, name
            if name.endswith("_bucket"):
                own.pop("le")
                rows.setdefault((name, tuple(own.items())), []).append(value)
            assert not name.endswith(("_ms", "_s"))
        for (name, own_labels), buckets in rows.items():
            assert buckets == sorted(buckets)
            assert buckets[-1] == page[name.removesuffix("_bucket") + "_count", own_labels]
    counters = [
        {
            key: value
            for key, value in page.items()
            if key[0].endswith(("_total", "_bucket", "_count", "_sum"))
            and "event_loop_lag" not in key[0]  # time goes on
        }
        for page in pages
    ]
    assert counters == [counters[0]] * len(pages)  # nothing happens any more
    assert {dict(labels).get("replica") for _, labels in counters[0]} == {"r1", "r2", None}


def test_no_counter_falls_while_requests_run(replicas: Replicas) -> None:
    async def run() -> list[str]:
        texts: list[str] = []
        async with replicas.served():
            requests = [asyncio.create_task(replicas.post(i, max_tokens=40)) for i in range(16)]
            while not all(task.done() for task in requests):
                texts.append(await replicas.scrape(len(texts)))
            await replicas.telemetries[0].stop()  # a replica that ends in order leaves its counts
            texts += [await replicas.scrape(1)]
        return texts

    texts = asyncio.run(asyncio.wait_for(run(), 120))
    assert len(texts) >= 10
    last: dict[Any, float] = {}
    pages = [samples(text) for text in texts]
    for page in pages:
        now = {key: value for key, value in page.items() if key[0].endswith(("_total", "_bucket", "_count"))}
        assert {key: (last[key], now.get(key)) for key in last if now.get(key, -1.0) < last[key]} == {}
        last = now
    assert total(pages[-1], "requests_total", reason="length") == 16
    assert total(pages[-1], "ttft_seconds_count") == 16
