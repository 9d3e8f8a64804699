"""Log-probabilities: scoring a prompt, plain JSON in the right shape."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.cases.conftest import Tiny
from tests.cases.serving import CHAT, COMPLETIONS, Serving
from tests.models.checkpoints import prompt_ids
from tests.unit.router.client import strict

TOLERANCE = 1e-4
HI = [{"role": "user", "content": "hi"}]


def check_scores(tiny: Tiny, ids: list[int], logprobs: dict[str, Any], num_scored: int) -> None:
    """Against one forward pass over prompt and answer."""
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    scores = torch.log_softmax(tiny.oracle.logits(ids), dim=-1)
    assert len(logprobs["tokens"]) == len(logprobs["text_offset"]) == num_scored
    for i in range(1, num_scored):
        row = scores[i - 1]
        assert logprobs["token_logprobs"][i] == pytest.approx(float(row[ids[i]]), abs=TOLERANCE)
        best = row.topk(3).values.tolist()
        found = sorted(logprobs["top_logprobs"][i].values(), reverse=True)
        assert found[:3] == pytest.approx(best, abs=TOLERANCE)
        assert len(found) in (3, 4)


def test_score_a_prompt(tiny: Tiny, tiny_server: Serving) -> None:
    ids = prompt_ids(50, 259, seed=1)
    body = {"prompt": ids, "max_tokens": 0, "echo": True, "logprobs": 3, "temperature": 0}
    answer = tiny_server.whole(COMPLETIONS, body)
    check_scores(tiny, ids, answer["choices"][0]["logprobs"], 50)
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["choices"][0]["finish_reason"] == "length"
    one = tiny_server.whole(COMPLETIONS, {**body, "max_tokens": 1, "return_token_ids": True})
    check_scores(tiny, ids + one["choices"][0]["token_ids"], one["choices"][0]["logprobs"], 51)
    assert one["usage"]["completion_tokens"] == 1


def test_score_two_prompts(tiny: Tiny, tiny_server: Serving) -> None:
    prompts = [prompt_ids(20, 259, seed=2), prompt_ids(33, 259, seed=3)]
    body = {"prompt": prompts, "max_tokens": 0, "echo": True, "logprobs": 3, "temperature": 0}
    answer = tiny_server.whole(COMPLETIONS, body)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    for ids, choice in zip(prompts, answer["choices"], strict=True):
        check_scores(tiny, ids, choice["logprobs"], len(ids))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 1, "temperature": 1},
        {"top_k": 1, "temperature": 1, "echo": True},
        {"logit_bias": {"5": -100, "6": -100}},
    ],
)
def test_only_finite_numbers(tiny_server: Serving, options: dict[str, Any], stream: bool) -> None:
    body = {"prompt": prompt_ids(9, 259), "max_tokens": 4, "logprobs": 5, "stream": stream, **options}
    text = tiny_server.post(COMPLETIONS, body).text
    blocks = [strict(text)] if not stream else [strict(b[6:]) for b in text.split("\n\n") if b[6:7] == "{"]
    entries = [c["logprobs"] for block in blocks for c in block["choices"] if c["logprobs"] is not None]
    values = [value for entry in entries for value in entry["token_logprobs"]]
    assert len(values) == 4 + 9 * ("echo" in options)
    assert values.count(None) == ("echo" in options) and (values[0] is None) == ("echo" in options)
    for entry in entries:
        for row in entry["top_logprobs"]:
            assert row is None or all(math.isfinite(value) for value in row.values())


def test_shapes(tiny_server: Serving) -> None:
    chat = {"messages": HI, "max_tokens": 3, "logprobs": True}
    content = tiny_server.whole(CHAT, chat)["choices"][0]["logprobs"]["content"]
    assert len(content) == 3 and all(entry["top_logprobs"] == [] for entry in content)
    assert tiny_server.post(CHAT, {"messages": HI, "top_logprobs": 3}).status_code == 400
    body = {"prompt": "hi", "max_tokens": 3, "logprobs": 0}
    logprobs = tiny_server.whole(COMPLETIONS, body)["choices"][0]["logprobs"]
    assert all(value <= 0 for value in logprobs["token_logprobs"])
    assert all(len(row) == 1 for row in logprobs["top_logprobs"])
    assert tiny_server.post(COMPLETIONS, {**body, "logprobs": 10000}).status_code == 400
