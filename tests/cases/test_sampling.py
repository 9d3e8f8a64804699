"""Edge values of sampling, several choices."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cases.conftest import Tiny
from tests.cases.serving import COMPLETIONS, Serving

ALIVE = {"prompt": "ping", "max_tokens": 4, "temperature": 0}


def test_edge_values(tiny: Tiny, tiny_server: Serving) -> None:
    prompt = tiny.prompt(12, 16)
    body = {"prompt": prompt, "max_tokens": 16, "seed": 1}
    alive = tiny_server.ids(ALIVE)
    greedy = tiny_server.ids({**body, "temperature": 0})
    assert greedy == tiny.oracle.greedy(prompt, 16)
    for temperature in (1e-5, 1e-8, 1e-38, 1e-45, 5e-324):
        assert tiny_server.ids({**body, "temperature": temperature}) == greedy
    assert tiny_server.ids({**body, "temperature": 1e-3}) == greedy  # the gap is 10 nats at least
    for options in ({"top_p": 1e-9}, {"top_k": 1}, {"min_p": 1.0}):
        assert tiny_server.ids({**body, "temperature": 1, **options}) == greedy
        assert tiny_server.ids(ALIVE) == alive
    open_ended = [
        tiny_server.ids({**body, "temperature": 1, **options})
        for options in ({}, {"top_k": -1}, {"top_k": 0}, {"top_k": 1_000_000})
    ]
    assert all(ids == open_ended[0] for ids in open_ended) and open_ended[0] != greedy
    for bad in ({"temperature": -0.1}, {"top_p": 1.5}, {"top_p": 0}, {"top_k": -2}):
        assert tiny_server.post(COMPLETIONS, {**body, **bad}).status_code == 400
    assert tiny_server.ids(ALIVE) == alive


def choices(server: Serving, body: dict[str, Any]) -> list[list[int]]:
    answer = server.whole(COMPLETIONS, {**body, "return_token_ids": True})
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(answer["choices"])))
    return [choice["token_ids"] for choice in answer["choices"]]


def test_choices(tiny: Tiny, tiny_server: Serving) -> None:
    prompt = tiny.prompt(20, 24)
    body = {"prompt": prompt, "max_tokens": 24, "temperature": 1.0, "n": 4}
    seeded = choices(tiny_server, {**body, "seed": 7})
    assert len(seeded) == 4 and len({tuple(ids) for ids in seeded}) > 1
    assert choices(tiny_server, {**body, "seed": 7}) == seeded
    assert choices(tiny_server, {**body, "seed": 8}) != seeded
    assert choices(tiny_server, body) != choices(tiny_server, body)
    greedy = tiny.oracle.greedy(prompt, 24)
    assert choices(tiny_server, {**body, "temperature": 0}) == [greedy] * 4
    alone = choices(tiny_server, {**body, "seed": 7, "n": 1})
    assert alone == seeded[:1]


def test_best_of(tiny_server: Serving) -> None:
    """The best of all that the same request with n = best_of gives, by log-probability per token; all are
    paid for. A stop id makes their lengths differ."""
    body = {
        "prompt": ["abc", "xyzxyz"],
        "max_tokens": 12,
        "seed": 7,
        "logprobs": 1,
        "stop_token_ids": [*range(9, 40)],
    }
    all_six = tiny_server.whole(COMPLETIONS, {**body, "n": 6})
    best = tiny_server.whole(COMPLETIONS, {**body, "n": 2, "best_of": 6})

    def mean(choice: dict[str, Any]) -> float:
        found = choice["logprobs"]["token_logprobs"]
        return float(sum(found) / len(found))

    expected = []
    for prompt in (all_six["choices"][:6], all_six["choices"][6:]):
        assert len({len(choice["logprobs"]["tokens"]) for choice in prompt}) > 1
        expected += sorted(prompt, key=mean, reverse=True)[:2]
    assert [{**choice, "index": 0} for choice in best["choices"]] == [
        {**choice, "index": 0} for choice in expected
    ]
    assert [choice["index"] for choice in best["choices"]] == [0, 1, 2, 3]
    assert best["usage"]["completion_tokens"] == all_six["usage"]["completion_tokens"]
    plain = tiny_server.whole(COMPLETIONS, {**body, "logprobs": None, "n": 2, "best_of": 6})
    assert [choice["text"] for choice in plain["choices"]] == [choice["text"] for choice in expected]
    assert all(choice["logprobs"] is None for choice in plain["choices"])


def test_a_seed_changes_nothing_in_a_beam_search(tiny_server: Serving) -> None:
    body = {"prompt": "abcabc", "max_tokens": 8, "use_beam_search": True, "n": 2, "best_of": 3}
    body["return_token_ids"] = True
    first, *others = (
        tiny_server.whole(COMPLETIONS, {**body, **seed})["choices"]
        for seed in ({}, {"seed": 1}, {"seed": -7}, {"seed": 2**63 - 1})
    )
    assert len({tuple(choice["token_ids"]) for choice in first}) == 2
    assert others == [first] * 3


@pytest.mark.parametrize(
    "options",
    [
        {"n": 4, "best_of": 2},
        {"n": 1, "best_of": 3, "stream": True},
        {"n": 0},
        {"n": -1},
    ],
)
def test_choices_that_are_refused(tiny_server: Serving, options: dict[str, Any]) -> None:
    assert tiny_server.post(COMPLETIONS, {"prompt": "a", **options}).status_code == 400
