"""Clients that go away (B48), and counts that add up (B52), over a real engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cases.serving import COMPLETIONS, Serving, serving
from tests.models.checkpoints import successor
from tests.models.toy_tokenizers import byte_tokenizer
from tests.unit.router.client import server, wait_until
from tests.unit.router.test_metrics import only

LONG = {"prompt": "a", "max_tokens": 30_000, "ignore_eos": True}


@pytest.fixture
def endless(tmp_path: Path) -> Iterator[Serving]:
    """Says z, then a, then b ... for ever; one request at a time, the others wait."""
    tokenizer = byte_tokenizer()
    perm = list(range(len(tokenizer)))
    first, last = tokenizer("a").input_ids[0], tokenizer("z").input_ids[0]
    for id in range(first, last + 1):
        perm[id] = id + 1 if id < last else first
    folder = successor(tmp_path, perm, tokenizer=tokenizer, max_position_embeddings=32_768)
    with serving(folder, max_running=1, num_blocks=2049) as running:
        yield running


def leave(url: str, after_s: float, **fields: Any) -> None:
    with pytest.raises(httpx.TimeoutException):
        httpx.post(url + COMPLETIONS, json={**LONG, **fields}, timeout=after_s)


def test_plain_requests_are_cancelled(endless: Serving) -> None:
    with server(endless.stack) as url:
        before = endless.dispatcher.stats
        leavers = [threading.Thread(target=leave, args=(url, 0.5)) for _ in range(10)]
        for thread in leavers:
            thread.start()
        wait_until(lambda: endless.dispatcher.stats.num_waiting >= 8)  # the tenth runs, the others wait
        for thread in leavers:
            thread.join(10)
        endless.idle(5)
        leave(url, 0.3, n=4)
        stats = endless.idle(5)
        generated = stats.generated_tokens_total
        assert generated > before.generated_tokens_total
        text = httpx.get(url + "/metrics").text
        assert only(text, "requests_total", model="model", reason="aborted") == 11
        assert only(text, "client_disconnects_total", model="model") == 11
        # A request aborted before its first step had no tokens; nothing is computed for nobody any more.
        assert endless.dispatcher.stats.generated_tokens_total == generated
        answer = httpx.post(url + COMPLETIONS, json={**LONG, "max_tokens": 5}, timeout=5).json()
        assert answer["choices"][0]["text"] == "bcdef"


def test_counts_add_up(endless: Serving) -> None:
    """12 that finish, 4 that leave after a token, 2 that leave the queue, 2 that are refused."""

    async def run(url: str) -> dict[str, int]:
        usage = {"prompt_tokens": 0, "completion_tokens": 0}
        async with httpx.AsyncClient(base_url=url, timeout=30) as client:

            async def post(**fields: Any) -> httpx.Response:
                return await client.post(COMPLETIONS, json={"prompt": "abc", **fields})

            finished = await asyncio.gather(
                *(post(max_tokens=5) for _ in range(6)), *(post(max_tokens=40, stop="fgh") for _ in range(6))
            )
            for response in finished:
                for name in usage:
                    usage[name] += response.json()["usage"][name]
            assert [(await post(max_tokens=0)).status_code, (await post(n=0)).status_code] == [400, 400]
            for _ in range(4):
                async with client.stream("POST", COMPLETIONS, json={**LONG, "stream": True}) as response:
                    await anext(response.aiter_lines())
            async with client.stream("POST", COMPLETIONS, json={**LONG, "stream": True}) as response:
                lines = response.aiter_lines()  # closing it would close the connection
                await anext(lines)
                queued = [asyncio.create_task(post(max_tokens=3)) for _ in range(2)]
                await asyncio.sleep(0.3)
                for task in queued:
                    task.cancel()
                await asyncio.gather(*queued, return_exceptions=True)
        return usage

    with server(endless.stack) as url:
        usage = asyncio.run(asyncio.wait_for(run(url), 60))
        endless.idle()
        wait_until(lambda: endless.service.admission.num_inflight == 0)
        texts = [httpx.get(url + "/metrics").text for _ in range(10)]
    assert len(set(texts)) == 1
    text = texts[0]
    reasons = {
        r: only(text, "requests_total", model="model", reason=r)
        for r in ("stop", "length", "aborted", "error")
    }
    assert reasons == {"stop": 6, "length": 6, "aborted": 7, "error": 0}
    assert only(text, "client_errors_total", model="model", code="invalid_value") == 2
    assert only(text, "ttft_seconds_count", model="model") == 12 + 5
    assert only(text, "prompt_tokens_total", model="model") == usage["prompt_tokens"] + 5 * 1 + 2 * 3
    delivered = only(text, "generation_tokens_total", model="model")
    engine = only(text, "engine_generated_tokens_total", model="model", group="local")
    # Tokens of the aborted ones are in both; an engine may be a few ahead of what it could still deliver.
    assert usage["completion_tokens"] + 5 <= delivered <= engine
