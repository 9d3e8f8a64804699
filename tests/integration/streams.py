"""Clients that stream all the time and compare every answer with what it must be."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.integration.serving import Serving

COMPLETIONS = "/v1/completions"


@dataclass
class Streams:
    """What the clients have seen so far."""

    num_right: int = 0
    wrong: list[str] = field(default_factory=list)  # failed, cut, or other tokens
    num_tokens: int = 0  # given out, of streams that go on too
    longest_s: float = 0.0  # between two tokens, or a request and the first one


def body_of(number: int, max_tokens: int) -> dict[str, Any]:
    """A request of its own prompt; every second one draws its tokens."""
    prompt = [3 + (number * 17 + i * (number + 2)) % 120 for i in range(40 + 7 * number)]
    sampling = {"temperature": 0} if number % 2 else {"temperature": 1.0, "seed": number}
    return {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "return_token_ids": True,
        **sampling,
    }


def answer_of(server: Serving, body: Mapping[str, Any]) -> list[int]:
    """The tokens of a whole answer."""
    answer = server.post(COMPLETIONS, body)
    assert answer.status_code == 200, answer.text
    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
    return tokens


@contextmanager
def streaming(server: Serving, bodies: list[dict[str, Any]], expected: list[list[int]]) -> Iterator[Streams]:
    """One client a body, which asks for it again and again until the block ends."""
    seen, ended, lock = Streams(), threading.Event(), threading.Lock()

    def run(body: dict[str, Any], right: list[int]) -> None:
        while not ended.is_set():
            problem = _stream(server, body, right, seen)
            with lock:
                if problem:
                    seen.wrong.append(problem)
                else:
                    seen.num_right += 1

    threads = [
        threading.Thread(target=run, args=pair, daemon=True) for pair in zip(bodies, expected, strict=True)
    ]
    for thread in threads:
        thread.start()
    try:
        yield seen
    finally:
        ended.set()
        for thread in threads:
            thread.join(timeout=60)
        assert not any(thread.is_alive() for thread in threads), "a stream does not end"


def _stream(server: Serving, body: Mapping[str, Any], right: list[int], seen: Streams) -> str:
    """Empty when the stream was right, otherwise what was wrong."""
    tokens: list[int] = []
    usage, is_done, heard_s = None, False, time.monotonic()
    request = {**body, "stream": True, "stream_options": {"include_usage": True}}
    try:
        with httpx.stream(
            "POST", server.url + COMPLETIONS, json=request, timeout=60.0, trust_env=False
        ) as answer:
            if answer.status_code != 200:
                return f"{answer.status_code} {answer.read().decode()[:300]}"
            for line in answer.iter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    is_done = True
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    return f"after {len(tokens)} tokens: {event['error']}"
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    new = choice.get("token_ids") or []
                    tokens += new
                    heard_s, before_s = time.monotonic(), heard_s
                    seen.longest_s = max(seen.longest_s, heard_s - before_s)
                    seen.num_tokens += len(new)
    except httpx.HTTPError as error:
        return f"after {len(tokens)} tokens: {error!r}"
    if not is_done:
        return f"cut after {len(tokens)} tokens"
    if tokens != right:
        at = next((i for i, pair in enumerate(zip(tokens, right, strict=False)) if pair[0] != pair[1]), -1)
        return f"{len(tokens)} tokens of {len(right)}, other ones from {at}"
    if usage is None or usage["completion_tokens"] != len(right):
        return f"usage is {usage}"
    return ""
