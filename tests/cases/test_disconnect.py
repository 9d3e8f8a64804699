"""Clients that go away, over a real engine."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cases.serving import COMPLETIONS, Serving, endless_letters, serving
from tests.unit.router.client import server, wait_until
from tests.unit.router.scrapes import only

LONG = {"prompt": "a", "max_tokens": 30_000, "ignore_eos": True}


@pytest.fixture
def endless(tmp_path: Path) -> Iterator[Serving]:
    """Says z, then a, then b ... for ever; one request at a time, the others wait."""
    folder = endless_letters(tmp_path)
    with serving(folder, max_running=1, num_blocks=2049) as running:
        yield running


def leave(url: str, after_s: float, **fields: Any) -> None:
    with pytest.raises(httpx.TimeoutException):
        httpx.post(url + COMPLETIONS, json={**LONG, **fields}, timeout=after_s)


def test_plain_requests_are_cancelled(endless: Serving) -> None:
    with server(endless.stack) as url:
        before = endless.dispatcher.stats
        leavers = [threading.Thread(target=leave, args=(url, 1.5)) for _ in range(10)]
        for thread in leavers:
            thread.start()
        wait_until(lambda: endless.dispatcher.stats.num_waiting >= 8)  # the tenth runs, the others wait
        for thread in leavers:
            thread.join(10)
        endless.idle(5)
        leave(url, 1.0, n=4)
        stats = endless.idle(5)
        generated = stats.generated_tokens_total
        assert generated > before.generated_tokens_total
        text = httpx.get(url + "/metrics").text
        assert only(text, "requests_total", model="model", reason="aborted") == 11
        assert only(text, "client_disconnects_total", model="model", stage="waiting") == 11
        # A request aborted before its first step had no tokens; nothing is computed for nobody any more.
        assert endless.dispatcher.stats.generated_tokens_total == generated
        answer = httpx.post(url + COMPLETIONS, json={**LONG, "max_tokens": 5}, timeout=5).json()
        assert answer["choices"][0]["text"] == "bcdef"
