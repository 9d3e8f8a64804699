"""Callers of the service, from the side of the switch where no host is."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Thread
from typing import Any

import httpx


@dataclass
class Stream:
    """One streamed completion and how it went."""

    text: str = ""
    longest_gap_s: float = 0.0
    finish_reason: str | None = None
    error: str = ""
    is_done: bool = False  # `[DONE]` has come
    group: str = ""
    times_s: list[float] = field(default_factory=list)


class Client:
    """Requests to the head's address with a key."""

    def __init__(self, url: str, key: str) -> None:
        self.url = url
        self._headers = {"authorization": f"Bearer {key}"}

    def get(self, path: str, *, with_key: bool = True) -> httpx.Response:
        headers = self._headers if with_key else {}
        return httpx.get(self.url + path, headers=headers, timeout=10.0, trust_env=False)

    def groups(self) -> list[dict[str, Any]]:
        """What the router that answers says of its groups."""
        groups: list[dict[str, Any]] = self.get("/load").json()["groups"]
        return groups

    def complete(self, prompt: str, max_tokens: int) -> str:
        """The text of a greedy completion."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        response = httpx.post(
            f"{self.url}/v1/completions", json=body, headers=self._headers, timeout=60.0, trust_env=False
        )
        assert response.status_code == 200, response.text
        return str(response.json()["choices"][0]["text"])

    @contextmanager
    def streams(self, prompts: list[str], max_tokens: int) -> Iterator[list[Stream]]:
        """Streams of all prompts at the same time; at the end all have ended."""
        streams = [Stream() for _ in prompts]
        threads = [
            Thread(target=self._stream, args=(stream, prompt, max_tokens))
            for stream, prompt in zip(streams, prompts, strict=True)
        ]
        for thread in threads:
            thread.start()
        yield streams
        for thread in threads:
            thread.join(120.0)
            assert not thread.is_alive()

    def _stream(self, stream: Stream, prompt: str, max_tokens: int) -> None:
        body = {
            "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True
        }  # fmt: skip
        last_s = time.monotonic()
        try:
            with httpx.stream(
                "POST", f"{self.url}/v1/completions", json=body, headers=self._headers, timeout=90.0,
                trust_env=False,
            ) as response:  # fmt: skip
                if response.status_code != 200:
                    stream.error = f"{response.status_code} {response.read()!r}"
                    return
                for line in response.iter_lines():
                    if not line.startswith("data: "):
                        continue
                    now_s = time.monotonic()
                    stream.longest_gap_s = max(stream.longest_gap_s, now_s - last_s)
                    last_s = now_s
                    stream.times_s.append(now_s)
                    if line == "data: [DONE]":
                        stream.is_done = True
                        continue
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        stream.error = str(event["error"])
                        continue
                    for choice in event["choices"]:
                        stream.text += choice["text"]
                        stream.finish_reason = choice["finish_reason"] or stream.finish_reason
        except httpx.HTTPError as error:
            stream.error = repr(error)
