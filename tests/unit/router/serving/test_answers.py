"""What answers hold, whole and streamed, over a dispatcher with scripted tokens."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.router.client import CHAT, COMPLETIONS, call, events, streamed_text, strict
from tests.unit.router.fakes import FakeDispatcher, byte_tokenizer, chunks_of, says, stack
from workers.types import FinishReason, TokenChunk, TokenLogprob

HI = [{"role": "user", "content": "hi"}]
TEXT = "ok 🦙 fin"


def test_order_of_a_chat_stream() -> None:
    app = stack(FakeDispatcher(says(TEXT, cached=16))).app
    body = {"messages": HI, "stream": True, "n": 2, "stream_options": {"include_usage": True}}
    found = events(call(app, CHAT, body).text)
    assert found[-1] == "[DONE]"
    for index in (0, 1):
        mine = [c for e in found[:-1] for c in e["choices"] if c["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in choice["delta"] for choice in mine[1:])
        assert mine[-1]["delta"] == {} and mine[-1]["finish_reason"] == "stop"
        assert all(choice["finish_reason"] is None for choice in mine[:-1])
        assert streamed_text(found, index) == TEXT
    usage = found[-2]
    num_prompt = len("<s>user: hi<eot>assistant: ") - len("<s><eot>") + 2
    assert usage["choices"] == []
    assert usage["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": 2 * (len(TEXT.encode()) + 1),
        "total_tokens": num_prompt + 2 * (len(TEXT.encode()) + 1),
        "prompt_tokens_details": {"cached_tokens": 16},
    }
    assert all(event["usage"] is None for event in found[:-2])
    assert len({(e["id"], e["created"], e["model"], e["object"]) for e in found[:-1]}) == 1


def test_no_usage_unless_asked_for() -> None:
    found = events(call(stack().app, COMPLETIONS, {"prompt": "a", "stream": True}).text)
    assert all("usage" not in event for event in found[:-1])
    assert [e["choices"][0]["text"] for e in found[:-1]] == ["h", "e", "l", "l", "o", ""]


def test_continuous_usage() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "a", "stream": True, "stream_options": options}
    found = events(call(stack().app, COMPLETIONS, body).text)
    # Five letters, then </s>, which ends the choice without text; the last one is the whole usage.
    assert [e["usage"]["completion_tokens"] for e in found[:-1]] == [1, 2, 3, 4, 5, 6, 6]
    chat = events(call(stack().app, CHAT, {**body, "prompt": None, "messages": HI}).text)
    assert [e["usage"]["completion_tokens"] for e in chat[:-1]] == [1, 1, 2, 3, 4, 5, 6, 6]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("max_tokens", [1, 4, 5, 6, 50])
def test_both_modes_say_the_same(path: str, max_tokens: int) -> None:
    app = stack(FakeDispatcher(says(TEXT))).app
    body: dict[str, Any] = {"max_tokens": max_tokens, "stop": ["never"]}
    body |= {"messages": HI} if path == CHAT else {"prompt": "a"}
    whole = call(app, path, body).json()
    choice = whole["choices"][0]
    text = choice["message"]["content"] if path == CHAT else choice["text"]
    found = events(call(app, path, {**body, "stream": True}).text)
    assert streamed_text(found) == text
    ids = byte_tokenizer().encode(TEXT)
    assert text == byte_tokenizer().decode(ids[:max_tokens])
    assert choice["finish_reason"] == ("stop" if max_tokens > len(ids) else "length")
    assert found[-2]["choices"][0]["finish_reason"] == choice["finish_reason"]
    assert whole["usage"]["completion_tokens"] == min(max_tokens, len(ids) + 1)


def test_several_tokens_in_a_chunk() -> None:
    ids = byte_tokenizer().encode(TEXT)

    def script(request: Any) -> Any:
        for start in range(0, len(ids), 3):
            yield TokenChunk(request_id=request.request_id, choice=0, token_ids=tuple(ids[start : start + 3]))
        yield TokenChunk(request_id=request.request_id, choice=0, finish_reason=FinishReason.LENGTH)

    app = stack(FakeDispatcher(script)).app
    found = events(call(app, COMPLETIONS, {"prompt": "a", "stream": True}).text)
    assert streamed_text(found) == TEXT
    assert call(app, COMPLETIONS, {"prompt": "a", "stop": "fi"}).json()["choices"][0]["text"] == "ok 🦙 "


def test_stop_string_cancels_and_counts_up_to_the_match() -> None:
    router = stack(FakeDispatcher(says("alpha beta gamma delta")))
    whole = call(router.app, COMPLETIONS, {"prompt": "a", "max_tokens": 60, "stop": ["beta gam"]}).json()
    choice = whole["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("alpha ", "stop", "beta gam")
    assert whole["usage"]["completion_tokens"] == len("alpha beta gam")
    assert (router.dispatcher.num_open, router.dispatcher.num_cancelled) == (0, 1)
    included = {"prompt": "a", "max_tokens": 60, "stop": "ta g", "include_stop_str_in_output": True}
    assert call(router.app, COMPLETIONS, included).json()["choices"][0]["text"] == "alpha beta g"


def test_stop_string_waits_for_min_tokens() -> None:
    app = stack(FakeDispatcher(says("xaxaxa"))).app
    body = {"prompt": "a", "max_tokens": 60, "stop": "a", "min_tokens": 3}
    assert call(app, COMPLETIONS, body).json()["choices"][0]["text"] == "xax"


def test_stop_id_is_no_text_but_a_reason() -> None:
    ids = [75, 76, 77]  # ijk

    def script(request: Any) -> Any:
        for i, id in enumerate(ids):
            end = {"finish_reason": FinishReason.STOP, "stop_token_id": id} if i == 2 else {}
            yield TokenChunk(request_id=request.request_id, choice=0, token_ids=(id,), **end)

    app = stack(FakeDispatcher(script)).app
    choice = call(app, COMPLETIONS, {"prompt": "a", "stop_token_ids": [77]}).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("ij", "stop", 77)


def test_prompt_lists_and_choices_are_numbered() -> None:
    def script(request: Any) -> Any:
        return says(byte_tokenizer().decode(request.prompt_token_ids) + "!")(request)

    router = stack(FakeDispatcher(script))
    body = {"prompt": ["a", "bcd"], "n": 2, "max_tokens": 9}
    whole = call(router.app, COMPLETIONS, body).json()
    assert [(c["index"], c["text"]) for c in whole["choices"]] == [
        (0, "a!"),
        (1, "a!"),
        (2, "bcd!"),
        (3, "bcd!"),
    ]
    assert whole["usage"]["prompt_tokens"] == 4
    assert whole["usage"]["completion_tokens"] == 2 * 3 + 2 * 5
    seeds = [request.sampling.seed for request in router.dispatcher.requests]
    assert seeds[0] != seeds[1]
    found = events(call(router.app, COMPLETIONS, {**body, "stream": True}).text)
    assert [streamed_text(found, i) for i in range(4)] == ["a!", "a!", "bcd!", "bcd!"]


def test_request_as_the_group_gets_it() -> None:
    router = stack()
    call(
        router.app,
        CHAT,
        {
            "messages": HI,
            "seed": 7,
            "temperature": 0,
            "top_k": 5,
            "top_p": 0.5,
            "min_p": 0.1,
            "presence_penalty": 1,
            "frequency_penalty": -1,
            "repetition_penalty": 1.2,
            "logit_bias": {"5": -100},
            "stop_token_ids": [4],
            "ignore_eos": True,
            "min_tokens": 2,
            "max_tokens": 9,
            "max_completion_tokens": 8,
            "logprobs": True,
            "top_logprobs": 2,
            "n": 3,
        },
    )
    (request,) = router.dispatcher.requests
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.min_tokens, sampling.seed, request.num_choices) == (8, 2, 7, 3)
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.0, 5, 0.5, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1.0, -1.0)
    assert (sampling.repetition_penalty, sampling.logit_bias) == (1.2, ((5, -100.0),))
    assert (sampling.stop_token_ids, sampling.ignore_eos, sampling.num_logprobs) == ((4,), True, 2)
    assert sampling.num_prompt_logprobs is None
    assert request.prompt_token_ids[0] == 0 and request.prompt_token_ids.count(2) == 1


def test_default_budgets() -> None:
    router = stack()
    call(router.app, CHAT, {"messages": HI})
    call(router.app, COMPLETIONS, {"prompt": "a"})
    call(router.app, COMPLETIONS, {"prompt": [5] * 4090})
    chat, short, long = (r.sampling.max_tokens for r in router.dispatcher.requests)
    assert (chat, short, long) == (4096 - 21, 16, 6)


def test_echo_and_scores() -> None:
    router = stack()
    body = {"prompt": [75, 76, 77], "max_tokens": 0, "echo": True, "logprobs": 1}
    whole = strict(call(router.app, COMPLETIONS, body).content)
    choice = whole["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("ijk", "length")
    assert choice["logprobs"] == {
        "tokens": ["i", "j", "k"],
        "token_logprobs": [None, -0.5, -0.5],
        "top_logprobs": [None, {"j": -0.5}, {"k": -0.5}],
        "text_offset": [0, 1, 2],
    }
    assert whole["usage"]["completion_tokens"] == 0
    assert router.dispatcher.requests[0].sampling.num_prompt_logprobs == 1
    longer = call(router.app, COMPLETIONS, {**body, "max_tokens": 2}).json()["choices"][0]
    assert longer["text"] == "ijkhe"
    assert longer["logprobs"]["text_offset"] == [0, 1, 2, 3, 4]
    found = events(call(router.app, COMPLETIONS, {**body, "max_tokens": 2, "stream": True}).text)
    assert streamed_text(found) == "ijkhe"
    tokens = [t for e in found[:-1] for c in e["choices"] if c["logprobs"] for t in c["logprobs"]["tokens"]]
    assert tokens == ["i", "j", "k", "h", "e"]


def scored_texts(found: list[Any], num_choices: int) -> list[tuple[str, list[str], list[float | None]]]:
    """Of each choice of a stream: its text, its tokens and their log-probabilities."""
    result = []
    for index in range(num_choices):
        entries = [
            c["logprobs"] for e in found[:-1] for c in e["choices"] if c["index"] == index and c["logprobs"]
        ]
        tokens = [token for entry in entries for token in entry["tokens"]]
        values = [value for entry in entries for value in entry["token_logprobs"]]
        result.append((streamed_text(found, index), tokens, values))
    return result


def test_echo_and_scores_of_several_prompts_in_a_stream() -> None:
    body = {"prompt": ["xy", "z"], "n": 2, "max_tokens": 2, "echo": True, "logprobs": 1, "stream": True}
    found = events(call(stack().app, COMPLETIONS, body).text)
    first = ("xyhe", ["x", "y", "h", "e"], [None, -0.5, -0.5, -0.5])
    second = ("zhe", ["z", "h", "e"], [None, -0.5, -0.5])
    assert scored_texts(found, 4) == [first, first, second, second]


def test_scores_that_come_after_another_choice() -> None:
    """Choice 1 may find the prompt cached, while choice 0 computes it to score it."""

    def script(request: Any) -> Any:
        chunks = list(chunks_of(request, [75, 76]))
        yield from (chunk for chunk in chunks if chunk.choice == 1)
        yield from (chunk for chunk in chunks if chunk.choice == 0)

    body = {"prompt": "xy", "n": 2, "max_tokens": 2, "echo": True, "logprobs": 1, "stream": True}
    found = events(call(stack(FakeDispatcher(script)).app, COMPLETIONS, body).text)
    # The token that ended the choice is no part of its text.
    assert scored_texts(found, 2) == [("xyi", ["x", "y", "i", "j"], [None, -0.5, -0.5, -0.5])] * 2


def test_echo_without_logprobs() -> None:
    choice = call(stack().app, COMPLETIONS, {"prompt": "é?", "max_tokens": 2, "echo": True}).json()[
        "choices"
    ][0]
    assert (choice["text"], choice["logprobs"]) == ("é?he", None)


def test_chat_logprobs() -> None:
    app = stack(FakeDispatcher(says("é"))).app
    whole = call(app, CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 1}).json()
    content = whole["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["bytes:\\xc3", "bytes:\\xa9", "</s>"]
    assert [entry["bytes"] for entry in content] == [[0xC3], [0xA9], list(b"</s>")]
    assert all(len(entry["top_logprobs"]) == 1 for entry in content)
    bare = call(app, CHAT, {"messages": HI, "logprobs": True}).json()
    assert all(entry["top_logprobs"] == [] for entry in bare["choices"][0]["logprobs"]["content"])


def test_infinite_logprobs_become_the_floor() -> None:
    def script(request: Any) -> Any:
        entry = TokenLogprob(token_id=75, logprob=float("-inf"), top=((75, float("nan")), (76, -99999.0)))
        yield TokenChunk(
            request_id=request.request_id,
            choice=0,
            token_ids=(75,),
            logprobs=(entry,),
            finish_reason=FinishReason.LENGTH,
        )

    body = {"prompt": "a", "logprobs": 2, "max_tokens": 1}
    logprobs = strict(call(stack(FakeDispatcher(script)).app, COMPLETIONS, body).content)["choices"][0][
        "logprobs"
    ]
    assert logprobs["token_logprobs"] == [-9999.0]
    assert logprobs["top_logprobs"] == [{"i": -9999.0, "j": -9999.0}]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_token_ids(path: str) -> None:
    app = stack(FakeDispatcher(says("hi"))).app
    body: dict[str, Any] = {"return_token_ids": True}
    body |= {"messages": HI} if path == CHAT else {"prompt": "ab"}
    whole = call(app, path, body).json()
    ids = [*byte_tokenizer().encode("hi"), 1]
    assert whole["choices"][0]["token_ids"] == ids
    prompt_ids = whole["prompt_token_ids"] if path == CHAT else whole["choices"][0]["prompt_token_ids"]
    found = events(call(app, path, {**body, "stream": True}).text)[:-1]
    assert [id for e in found for c in e["choices"] for id in c.get("token_ids", ())] == ids
    first = found[0] if path == CHAT else found[0]["choices"][0]
    assert first["prompt_token_ids"] == prompt_ids


def test_cache_salts_only_separate_further(tmp_path: Any) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alpha\nbeta\n")
    keys.chmod(0o600)
    router = stack(api_keys_file=str(keys))
    for key in ("alpha", "beta"):
        headers = {"authorization": f"Bearer {key}"}
        for extra in ({}, {"cache_salt": "x"}):
            assert call(router.app, COMPLETIONS, {"prompt": "a", **extra}, headers=headers).status_code == 200
    salts = [request.cache_salt for request in router.dispatcher.requests]
    assert len(set(salts)) == 4 and all(salts)
    assert not any("alpha" in salt or "beta" in salt for salt in salts)
    open_router = stack()
    call(open_router.app, COMPLETIONS, {"prompt": "a"})
    assert open_router.dispatcher.requests[0].cache_salt == ""


def test_tokenize_and_back() -> None:
    app = stack().app
    body = call(app, "/tokenize", {"prompt": "hé", "return_token_strs": True}).json()
    assert body == {
        "count": 3,
        "max_model_len": 4096,
        "tokens": byte_tokenizer().encode("hé"),
        "token_strs": ["h", "bytes:\\xc3", "bytes:\\xa9"],
    }
    assert call(app, "/detokenize", {"tokens": body["tokens"]}).json() == {"prompt": "hé"}
    chat = call(app, "/tokenize", {"messages": HI}).json()
    assert chat["count"] == 21 and chat["token_strs"] is None
    for bad in ({"tokens": [259]}, {"tokens": [True]}, {"tokens": "x"}, {}):
        assert call(app, "/detokenize", bad).status_code == 400
    for bad in ({}, {"prompt": "a", "messages": HI}, {"prompt": ""}):
        assert call(app, "/tokenize", bad).status_code == 400


def test_unfinished_answer_is_an_error() -> None:
    def script(request: Any) -> Any:
        yield next(chunks_of(request, [75, 76, 77]))

    app = stack(FakeDispatcher(script)).app
    whole = call(app, COMPLETIONS, {"prompt": "a"})
    assert (whole.status_code, whole.json()["error"]["code"]) == (500, "incomplete_answer")
    found = events(call(app, COMPLETIONS, {"prompt": "a", "stream": True}).text)
    assert found[-1]["error"]["code"] == "incomplete_answer"
    assert "[DONE]" not in found
