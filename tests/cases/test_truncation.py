"""Prompts that are longer than the context: refused, or cut as the client says, and usage tells what."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.cases.conftest import Tiny
from tests.cases.serving import Serving, serving
from tests.unit.router.client import CHAT, COMPLETIONS, error_of

LIMIT = 96  # tokens of context; the tokenizer's are bytes


@pytest.fixture(scope="module")
def server(tiny: Tiny) -> Iterator[Serving]:
    with serving(tiny.folder, max_model_len=LIMIT) as server:
        yield server


def prompt_of(server: Serving, body: dict[str, Any], path: str = COMPLETIONS) -> tuple[str, dict[str, int]]:
    """The prompt that the model was given, and usage.truncation."""
    answer = server.whole(path, {**body, "return_token_ids": True, "temperature": 0})
    ids = answer["prompt_token_ids"] if path == CHAT else answer["choices"][0]["prompt_token_ids"]
    assert len(ids) == answer["usage"]["prompt_tokens"]
    return server.tokenizer.decode(ids), answer["usage"]["truncation"]


TEXT = "".join(f"{number:03d}," for number in range(50))  # 200 tokens


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"truncate_prompt_tokens": 8}, TEXT[-8:]),
        ({"truncate_prompt_tokens": 8, "truncation_side": "left"}, TEXT[-8:]),
        ({"truncate_prompt_tokens": 8, "truncation_side": "right"}, TEXT[:8]),
        ({"truncate_prompt_tokens": -1}, TEXT[-(LIMIT - 16) :]),
        ({"truncate_prompt_tokens": -1, "max_tokens": 6}, TEXT[-(LIMIT - 6) :]),
        ({"truncate_prompt_tokens": -1, "max_tokens": 6, "truncation_side": "right"}, TEXT[: LIMIT - 6]),
    ],
)
@pytest.mark.parametrize("as_ids", [False, True])
def test_tokens_on_one_side(server: Serving, fields: dict[str, Any], expected: str, as_ids: bool) -> None:
    prompt = server.tokenizer.encode(TEXT) if as_ids else TEXT
    found = prompt_of(server, {"prompt": prompt, **fields})
    assert found == (expected, {"dropped_messages": 0, "dropped_tokens": 200 - len(expected)})


def test_what_fits_is_left_as_it_is(server: Serving) -> None:
    nothing = {"dropped_messages": 0, "dropped_tokens": 0}
    assert prompt_of(server, {"prompt": "short", "truncate_prompt_tokens": 50}) == ("short", nothing)
    answer = server.whole(COMPLETIONS, {"prompt": "short", "max_tokens": 2})
    assert "truncation" not in answer["usage"]
    several = {"prompt": [TEXT, "short"], "truncate_prompt_tokens": 20, "max_tokens": 2}
    usage = server.whole(COMPLETIONS, several)["usage"]
    assert (usage["prompt_tokens"], usage["truncation"]["dropped_tokens"]) == (25, 180)


def test_a_cut_that_is_still_too_long_is_refused(server: Serving) -> None:
    for fields in ({"truncate_prompt_tokens": 92, "max_tokens": 10}, {}):
        response = server.post(COMPLETIONS, {"prompt": TEXT, **fields})
        assert (response.status_code, error_of(response)["code"]) == (400, "context_length_exceeded")


def turns(*roles_and_texts: str) -> list[dict[str, str]]:
    names = {"s": "system", "u": "user", "a": "assistant"}
    return [{"role": names[each[0]], "content": each} for each in roles_and_texts]


CHAT_BODY = {
    "messages": turns("s" * 10, "u1" * 8, "a1" * 8, "s2", "u2" * 4, "a2" * 4, "u3", "a3", "u4"),
    "truncation": "auto",
}


def rendered(*messages: str) -> str:
    return (
        "<s>"
        + "".join(f"{each['role']}: {each['content']}<eot>" for each in turns(*messages))
        + "assistant: "
    )


def test_the_oldest_turns_are_dropped_as_wholes(server: Serving) -> None:
    """As few as it takes: a budget of more tokens drops more."""
    whole = len(server.tokenizer.encode(rendered(*(m["content"] for m in CHAT_BODY["messages"]))))
    kept = {
        2: ("s" * 10, "s2", "u3", "a3", "u4"),
        4: ("s" * 10, "s2", "u4"),
    }
    for num_turns, contents in ((2, kept[2]), (4, kept[4])):
        text = rendered(*contents)
        num_kept = len(server.tokenizer.encode(text))
        found = prompt_of(server, {**CHAT_BODY, "max_tokens": LIMIT - num_kept}, CHAT)
        dropped = len(CHAT_BODY["messages"]) - len(contents)
        assert found == (text, {"dropped_messages": dropped, "dropped_tokens": whole - num_kept}), num_turns


def test_streams_say_it_too(server: Serving) -> None:
    usage = server.streamed(CHAT, {**CHAT_BODY, "max_tokens": 8})[-2]["usage"]
    assert usage["truncation"]["dropped_messages"] > 0


def test_the_last_turn_and_the_system_are_never_dropped(server: Serving) -> None:
    messages = turns("s" * 60, "u1", "a1", "u2" * 30)
    body = {"messages": messages, "truncation": "auto", "max_tokens": 4}
    response = server.post(CHAT, body)
    assert (response.status_code, error_of(response)["code"]) == (400, "context_length_exceeded")
    response = server.post(CHAT, {**CHAT_BODY, "truncation": "disabled", "max_tokens": 4})
    assert (response.status_code, error_of(response)["code"]) == (400, "context_length_exceeded")


def test_a_conversation_cut_by_tokens(server: Serving) -> None:
    text, truncation = prompt_of(
        server, {"messages": CHAT_BODY["messages"], "truncate_prompt_tokens": 11, "max_tokens": 4}, CHAT
    )
    assert text == "assistant: " and truncation["dropped_messages"] == 0
