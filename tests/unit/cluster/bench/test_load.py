"""Load against a server of this process: sent when due, timed from then, whatever the answers do."""

import asyncio
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
from aiohttp import web

from cluster.bench.client import CompletionClient, ServedModel, ServerUnusable, completion_body
from cluster.bench.load import Due, Server, of_trace, poisson, run_load
from cluster.figures.traces import TraceRequest


class SlowServer:
    """Answers `/v1/completions` with a token each 10 ms, after `delay_s`; in a thread of its own."""

    def __init__(self) -> None:
        self.delay_s = 0.0
        self.bodies: list[dict[str, object]] = []
        self.status = 200
        self.is_cut = False
        self.max_model_len: int | None = 512
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "SlowServer":
        self._thread.start()
        assert self._started.wait(10)
        return self

    def __exit__(self, *exc: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._complete)
        runner = web.AppRunner(app)
        self._loop.run_until_complete(runner.setup())
        site = web.TCPSite(runner, "127.0.0.1", 0)
        self._loop.run_until_complete(site.start())
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._started.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny", "max_model_len": self.max_model_len}]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        await asyncio.sleep(self.delay_s)
        if self.status != 200:
            return web.Response(status=self.status, text="too busy")
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(body["max_tokens"]):
            await response.write(b'data: {"choices": [{"text": "a"}]}\n\n')
            await asyncio.sleep(0.01)
        if self.is_cut:
            return response
        usage = {
            "prompt_tokens": len(body["prompt"]),
            "completion_tokens": body["max_tokens"],
            "prompt_tokens_details": {"cached_tokens": 2},
        }
        await response.write(b'data: {"choices": [{"text": "", "finish_reason": "length"}]}\n\n')
        await response.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n".encode())
        await response.write(b": keep-alive\n\ndata: [DONE]\n\n")
        return response


@pytest.fixture
def server() -> Iterator[SlowServer]:
    with SlowServer() as found:
        yield found


def dues(*at_s: float, max_tokens: int = 3) -> list[Due]:
    return [
        Due(number=i, due_s=due_s, prompt=[10 + i] * 4, max_tokens=max_tokens) for i, due_s in enumerate(at_s)
    ]


def sent(server: SlowServer, load: list[Due], timeout_s: float = 30.0):
    where = Server(url=server.url, headers={}, timeout_s=timeout_s)
    return run_load(where, lambda _: load, lambda text: None).outcomes


def test_an_answer_is_counted_and_timed(server: SlowServer) -> None:
    (found,) = sent(server, dues(0.0))
    assert found.is_answered and found.error == ""
    assert (found.prompt_tokens, found.output_tokens, found.cached_tokens) == (4, 3, 2)
    assert len(found.token_s) == 3
    assert 0 < found.token_s[0] < found.token_s[-1] <= found.end_s
    assert server.bodies == [
        {
            "model": "tiny",
            "prompt": [10, 10, 10, 10],
            "max_tokens": 3,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]


def test_slow_answers_do_not_hold_back_the_next_requests(server: SlowServer) -> None:
    server.delay_s = 1.0
    found = sent(server, dues(0.0, 0.1, 0.2, 0.3, 0.4))
    assert all(outcome.is_answered for outcome in found)
    # A closed loop would have sent the second after a second.
    assert found[-1].sent_s < 0.9
    assert all(outcome.token_s[0] - outcome.due_s >= 1.0 for outcome in found)


def test_failures_are_outcomes(server: SlowServer) -> None:
    server.status = 503
    (refused,) = sent(server, dues(0.0))
    assert refused.error == "status 503: too busy" and not refused.is_answered
    server.status, server.is_cut = 200, True
    (cut,) = sent(server, dues(0.0))
    assert cut.error == "the stream ended before its end"
    server.delay_s = 5.0
    (late,) = sent(server, dues(0.0), timeout_s=0.2)
    assert late.error.startswith("TimeoutError")


def test_a_server_that_is_not_there_is_named() -> None:
    where = Server(url="http://127.0.0.1:9", headers={}, timeout_s=5.0)
    with pytest.raises(ServerUnusable, match=r"http://127\.0\.0\.1:9 does not answer"):
        run_load(where, lambda _: dues(0.0), lambda text: None)


def test_the_model_tells_its_length(server: SlowServer) -> None:
    async def ask() -> ServedModel:
        client = CompletionClient(server.url, headers={}, timeout_s=5.0, clock=lambda: 0.0)
        async with client:
            return await client.model()

    assert asyncio.run(ask()) == ServedModel(name="tiny", max_model_len=512)


def test_poisson_arrivals_have_their_rate_and_share_what_they_should() -> None:
    load = list(poisson(rate=50.0, requests=4000, prompt=20, output=5, vocab_size=1000, seed=3, shared=8))
    gaps = [after.due_s - before.due_s for before, after in pairwise(load)]
    assert sum(gaps) / len(gaps) == pytest.approx(1 / 50, rel=0.05)
    assert sum(gap > 2 / 50 for gap in gaps) / len(gaps) == pytest.approx(0.135, abs=0.02)  # exp(-2)
    assert {tuple(due.prompt[:8]) for due in load} == {tuple(load[0].prompt[:8])}
    assert len({tuple(due.prompt) for due in load}) == 4000
    assert all(len(due.prompt) == 20 and due.max_tokens == 5 for due in load)
    again = list(poisson(rate=50.0, requests=4000, prompt=20, output=5, vocab_size=1000, seed=3, shared=8))
    assert again == load


def test_a_trace_is_cut_to_what_the_model_can() -> None:
    request = TraceRequest(
        number=4,
        arrival_s=7.0,
        prompt_tokens=600,
        output_tokens=100,
        prefix_ids=(1, 2),
        tokens_per_id=512,
    )
    later = replace(request, number=5, arrival_s=9.5, output_tokens=400)
    first, second = of_trace([request, later], vocab_size=1000, longest=512)
    assert (first.due_s, second.due_s) == (0.0, 2.5)
    assert (len(first.prompt), first.max_tokens) == (412, 100)
    assert (len(second.prompt), second.max_tokens) == (256, 256)
    assert second.prompt == first.prompt[:256]
    (whole,) = of_trace([request], vocab_size=1000, longest=None)
    assert len(whole.prompt) == 600


def test_bodies_are_compact() -> None:
    assert completion_body("m", [1, 2], 3).startswith(b'{"model":"m","prompt":[1,2],"max_tokens":3,')
