"""Requests that are unusual, and right."""

from __future__ import annotations

import pytest

from tests.unit.router.client import CHAT, COMPLETIONS, call
from tests.unit.router.fakes import FakeDispatcher, says, stack

HI = [{"role": "user", "content": "hi"}]


def test_harmless_values_pass() -> None:
    router = stack()
    fields = {
        "temperature": 1e-30,
        "top_k": 1_000_000,
        "use_beam_search": False,
        "early_stopping": False,
        "store": False,
        "length_penalty": 1.0,
        "response_format": {"type": "text", "json_schema": None},
        "parallel_tool_calls": True,
        "user": "a\r\n\x1b[31m",
        "metadata": {"a": "b"},
        "stop": [],
        "stop_token_ids": [],
        "cache_salt": "mine",
        "spaces_between_special_tokens": True,
    }
    assert call(router.app, COMPLETIONS, {"prompt": "a", "suffix": "", **fields}).status_code == 200
    assert call(router.app, CHAT, {"messages": HI, "modalities": ["text"], **fields}).status_code == 200
    sampling = router.dispatcher.requests[0].sampling
    assert (sampling.temperature, sampling.top_k) == (1e-30, 0)


def test_lenient_ignores_unknown_fields_only() -> None:
    app = stack(lenient=True).app
    assert call(app, COMPLETIONS, {"prompt": "a", "newest_field": 1}).status_code == 200
    assert call(app, COMPLETIONS, {"prompt": "a", "guided_json": {}}).status_code == 400


@pytest.mark.parametrize(
    "text",
    ["\0", "‮abc", "​" * 50, "x" * 4000, "é" + "\u0301" * 2000, "\x1b[31m", "￿", "\r\n"],
)
def test_odd_text_is_served(text: str) -> None:
    router = stack(FakeDispatcher(says(text[:100])))
    response = call(router.app, COMPLETIONS, {"prompt": text[:1000], "max_tokens": 500})
    assert response.status_code == 200
    assert response.json()["choices"][0]["text"] == text[:100]
    assert call(router.app, CHAT, {"messages": [{"role": "user", "content": text[:900]}]}).status_code == 200
