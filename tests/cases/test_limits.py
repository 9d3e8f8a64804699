"""Exact fit of prompt and budget, empty prompts and foreign ids, learned positions."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cases.conftest import Tiny
from tests.cases.serving import CHAT, COMPLETIONS, Serving, serving
from tests.models.checkpoints import MARGIN, build, family, pos_script, prompt_ids
from tests.models.oracle import Oracle
from tests.models.toy_tokenizers import byte_tokenizer
from tests.unit.router.client import error_of, events, server, streamed_text

LIMIT = 128


@pytest.fixture(scope="module")
def short(tiny: Tiny) -> Iterator[Serving]:
    with serving(tiny.folder, max_model_len=LIMIT) as running:
        yield running
        running.idle()


def fits(running: Serving, prompt: int, budget: int, limit: int = LIMIT) -> None:
    body = {"prompt": prompt_ids(prompt, 120), "max_tokens": budget, "temperature": 0, "ignore_eos": True}
    response = running.post(COMPLETIONS, body)
    if prompt + budget <= limit:
        assert response.json()["usage"]["completion_tokens"] == budget
        return
    error = error_of(response)
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    assert all(str(number) in error["message"] for number in (prompt, budget, limit))


@pytest.mark.parametrize(
    ("prompt", "budget"),
    [(127, 1), (120, 8), (120, 9), (128, 1), (129, 1), (1, 127), (1, 128), (120, 1_000_000)],
)
def test_exact_fit(short: Serving, prompt: int, budget: int) -> None:
    fits(short, prompt, budget)


def test_default_budgets(short: Serving) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "ignore_eos": True, "temperature": 0}
    answer = short.both(CHAT, chat)
    usage = answer.usage
    assert usage["prompt_tokens"] + usage["completion_tokens"] == LIMIT
    assert answer.finish_reason == "length"
    plain = short.whole(COMPLETIONS, {"prompt": "hi", "ignore_eos": True})
    assert plain["usage"]["completion_tokens"] == 16


BAD: list[dict[str, Any]] = [
    *({"prompt": prompt} for prompt in ("", [""], [], [[]], ["a", ""])),
    *({"prompt": [id]} for id in (-1, 259, 2147483648, 9223372036854775808, 1.5, True)),
    *({"logit_bias": bias} for bias in ({"259": 5}, {"-1": 5}, {"abc": 5}, {"5": 1000})),
    *({"stop_token_ids": [id], "min_tokens": 2} for id in (259, -1)),
]


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_bad_requests_beside_a_running_one(tiny: Tiny, tensor_parallel: int) -> None:
    with serving(tiny.folder, tensor_parallel=tensor_parallel) as running, server(running.stack) as url:
        alive = {"prompt": "ping", "max_tokens": 4, "temperature": 0}
        stream = {"prompt": "x" * 20, "max_tokens": 200, "temperature": 0, "ignore_eos": True, "stream": True}

        def post(body: dict[str, Any]) -> httpx.Response:
            return httpx.post(url + COMPLETIONS, json=body, timeout=30)

        first = post(alive).json()["choices"][0]["text"]
        undisturbed = streamed_text(events(post(stream).text))
        seen: list[str] = []
        thread = threading.Thread(target=lambda: seen.append(post(stream).text))
        thread.start()
        for bad in BAD:
            assert post({"prompt": "a", **bad}).status_code == 400, bad
        thread.join(30)
        assert streamed_text(events(seen[0])) == undisturbed
        assert post(alive).json()["choices"][0]["text"] == first
        running.idle()


def test_learned_positions(tmp_path: Path) -> None:
    folder = build(tmp_path / "gpt2", family("gpt2"), vocab_size=259)
    byte_tokenizer().save_pretrained(folder)
    oracle = Oracle(folder)
    with serving(folder) as running:
        for length in (1, 17, 40):
            found = next(
                (ids, continuation.token_ids)
                for seed in range(100)
                if (continuation := oracle.continuation(ids := prompt_ids(length, 259, seed=seed), 20)).margin
                >= MARGIN
            )
            assert running.ids({"prompt": found[0], "max_tokens": 20, "temperature": 0}) == found[1]
        for prompt, budget in ((60, 4), (60, 5), (64, 1)):
            fits(running, prompt, budget, 64)
        running.idle()
    with pytest.raises(ValueError, match="64"):
        serving(folder, max_model_len=128).__enter__()


def test_script_over_sixty_positions(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    text = "".join(chr(97 + i % 26) for i in range(58))
    folder = pos_script(tmp_path, [*tokenizer(text).input_ids, 1], prompt_len=2, tokenizer=tokenizer)
    with serving(folder) as running:
        assert running.both(COMPLETIONS, {"prompt": "go", "max_tokens": 60, "temperature": 0}).text == text
