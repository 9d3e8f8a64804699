"""Prompts around block borders, cold and fully cached."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from tests.cases.conftest import Tiny
from tests.cases.serving import COMPLETIONS, Serving

TOLERANCE = 1e-4


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 48, 64])
def test_block_multiples(tiny: Tiny, tiny_server: Serving, length: int) -> None:
    prompt = tiny.prompt(length, 20)
    ids = tiny.oracle.greedy(prompt, 20)
    scores = tiny.oracle.logprobs(prompt + ids)[length - 1 :]
    body = {"prompt": prompt, "max_tokens": 20, "temperature": 0, "logprobs": 1, "return_token_ids": True}

    def check(answer: dict[str, Any]) -> int:
        choice = answer["choices"][0]
        assert choice["token_ids"] == ids
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(scores, abs=TOLERANCE)
        assert answer["usage"]["prompt_tokens"] == length
        cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert 0 <= cached <= length - 1 and cached % 16 == 0
        return cached

    assert check(tiny_server.whole(COMPLETIONS, body)) == 0
    full = (length - 1) // 16 * 16
    assert check(tiny_server.whole(COMPLETIONS, body)) == full

    async def at_once() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app=tiny_server.stack.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://router", timeout=30) as client:
            return await asyncio.gather(*(client.post(COMPLETIONS, json=body) for _ in range(5)))

    for response in asyncio.run(at_once()):
        assert check(response.json()) == full
    longer = tiny_server.whole(COMPLETIONS, {**body, "prompt": prompt + ids, "max_tokens": 8})
    assert longer["choices"][0]["token_ids"] == tiny.oracle.continuation(prompt + ids, 8).token_ids
    cached = longer["usage"]["prompt_tokens_details"]["cached_tokens"]
    # Of the answer, every token but the last one was computed.
    assert cached == (length + 19) // 16 * 16


def test_salts_share_nothing(tiny: Tiny, tiny_server: Serving) -> None:
    prompt = [*tiny.prompt(40, 4)][::-1]
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0}

    def cached(**extra: str) -> int:
        usage = tiny_server.whole(COMPLETIONS, {**body, **extra})["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert [cached(), cached(), cached(cache_salt="a"), cached(cache_salt="a"), cached(cache_salt="b")] == [
        0,
        32,
        0,
        32,
        0,
    ]
