"""Bad requests and the exact answer to each.

Every row is sent streaming and not, where both exist; the answer must be the same, nothing may reach a group,
and the router must go on serving.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from tests.unit.router.client import CHAT, COMPLETIONS, call, error_of
from tests.unit.router.fakes import FakeDispatcher, Stack, says, stack

HI = [{"role": "user", "content": "hi"}]


class Row(NamedTuple):
    """Fields added to a good request, and what is wrong with it."""

    fields: dict[str, Any]
    code: str
    param: str | None


BOTH = [
    # Unknown and unsupported fields.
    Row({"max_tokns": 5}, "unknown_parameter", "max_tokns"),
    Row({"max_tokns": None}, "unknown_parameter", "max_tokns"),
    Row({"extra_body": {}}, "unknown_parameter", "extra_body"),
    Row(
        {"stream_options": {"include_usage": True, "x": 1}, "stream": True},
        "unknown_parameter",
        "stream_options.x",
    ),
    Row({"prompt_embeds": "AAAA"}, "unsupported_parameter", "prompt_embeds"),
    Row({"kv_transfer_params": {}}, "unsupported_parameter", "kv_transfer_params"),
    Row({"priority": 0}, "unsupported_parameter", "priority"),
    Row({"chat_template": "{{ 1 }}"}, "unsupported_parameter", "chat_template"),
    Row({"chat_template_kwargs": {}}, "unsupported_parameter", "chat_template_kwargs"),
    Row({"length_penalty": 0.5}, "invalid_value", "length_penalty"),
    Row({"early_stopping": True}, "invalid_value", "early_stopping"),
    Row({"use_beam_search": 1}, "invalid_type", "use_beam_search"),
    Row({"use_beam_search": True, "stream": True}, "invalid_value", "stream"),
    Row({"use_beam_search": True, "temperature": 0.7}, "invalid_value", "temperature"),
    Row({"use_beam_search": True, "best_of": 65}, "invalid_value", "best_of"),
    Row({"use_beam_search": True, "n": 3, "best_of": 2}, "invalid_value", "best_of"),
    Row({"use_beam_search": True, "n": 9}, "invalid_value", "n"),
    Row({"use_beam_search": True, "length_penalty": 11}, "invalid_value", "length_penalty"),
    Row({"use_beam_search": True, "length_penalty": "1"}, "invalid_type", "length_penalty"),
    Row({"use_beam_search": True, "early_stopping": "sometimes"}, "invalid_type", "early_stopping"),
    Row(
        {"use_beam_search": True, "response_format": {"type": "json_object"}},
        "unsupported_parameter",
        "response_format",
    ),
    Row({"guided_json": {}}, "unsupported_parameter", "guided_json"),
    Row({"bad_words": ["x"]}, "unsupported_parameter", "bad_words"),
    Row({"store": True}, "unsupported_parameter", "store"),
    Row({"prompt_logprobs": 1}, "unsupported_parameter", "prompt_logprobs"),
    Row({"response_format": {"type": "json_object", "x": 1}}, "unknown_parameter", "response_format"),
    Row({"response_format": {"type": "text", "x": 1}}, "unknown_parameter", "response_format"),
    Row({"response_format": {"type": "json_schema"}}, "invalid_schema", "response_format.json_schema"),
    Row(
        {"use_beam_search": True, "structured_outputs": {"regex": "a"}},
        "unsupported_parameter",
        "structured_outputs",
    ),
    Row({"truncate_prompt_tokens": 0}, "invalid_value", "truncate_prompt_tokens"),
    Row({"truncate_prompt_tokens": -2}, "invalid_value", "truncate_prompt_tokens"),
    Row({"truncate_prompt_tokens": 4, "truncation_side": "top"}, "invalid_value", "truncation_side"),
    Row({"truncation_side": "left"}, "invalid_value", "truncation_side"),
    Row({"structured_outputs": {"regex": 1}}, "invalid_type", "structured_outputs.regex"),
    Row({"structured_outputs": {"json": [1]}}, "invalid_schema", "structured_outputs.json"),
    Row({"structured_outputs": {"x": 1}}, "unsupported_parameter", "structured_outputs.x"),
    Row({"structured_outputs": {"regex": "a", "json": {}}}, "invalid_value", "structured_outputs"),
    Row({"response_format": {"type": "xml"}}, "invalid_value", "response_format.type"),
    # Types: no silent casts.
    Row({"max_tokens": "5"}, "invalid_type", "max_tokens"),
    Row({"max_tokens": True}, "invalid_type", "max_tokens"),
    Row({"max_tokens": 5.0}, "invalid_type", "max_tokens"),
    Row({"max_tokens": 1e3}, "invalid_type", "max_tokens"),
    Row({"max_tokens": 2.5}, "invalid_type", "max_tokens"),
    Row({"max_tokens": [5]}, "invalid_type", "max_tokens"),
    Row({"temperature": "0"}, "invalid_type", "temperature"),
    Row({"temperature": True}, "invalid_type", "temperature"),
    Row({"stream": "yes"}, "invalid_type", "stream"),
    Row({"stream": 1}, "invalid_type", "stream"),
    Row({"ignore_eos": "true"}, "invalid_type", "ignore_eos"),
    Row({"model": 7}, "invalid_type", "model"),
    # Ranges.
    Row({"max_tokens": 0}, "invalid_value", "max_tokens"),
    Row({"max_tokens": -1}, "invalid_value", "max_tokens"),
    Row({"max_tokens": 2**63}, "context_length_exceeded", "max_tokens"),
    Row({"max_tokens": 10**22}, "context_length_exceeded", "max_tokens"),
    Row({"n": 0}, "invalid_value", "n"),
    Row({"n": -1}, "invalid_value", "n"),
    Row({"n": 9}, "invalid_value", "n"),
    Row({"n": 10**9}, "invalid_value", "n"),
    Row({"temperature": -0.1}, "invalid_value", "temperature"),
    Row({"temperature": 2.1}, "invalid_value", "temperature"),
    Row({"top_p": 0}, "invalid_value", "top_p"),
    Row({"top_p": 1.5}, "invalid_value", "top_p"),
    Row({"top_k": -2}, "invalid_value", "top_k"),
    Row({"min_p": -0.1}, "invalid_value", "min_p"),
    Row({"min_p": 1.1}, "invalid_value", "min_p"),
    Row({"presence_penalty": 2.5}, "invalid_value", "presence_penalty"),
    Row({"frequency_penalty": -2.5}, "invalid_value", "frequency_penalty"),
    Row({"repetition_penalty": 0}, "invalid_value", "repetition_penalty"),
    Row({"seed": 2**63}, "invalid_value", "seed"),
    Row({"seed": -(2**63) - 1}, "invalid_value", "seed"),
    Row({"seed": 2**64}, "invalid_value", "seed"),
    Row({"seed": 1.5}, "invalid_type", "seed"),
    Row({"min_tokens": -1}, "invalid_value", "min_tokens"),
    Row({"min_tokens": 6, "max_tokens": 5}, "invalid_value", "min_tokens"),
    Row({"stop": ""}, "invalid_value", "stop"),
    Row({"stop": ["a", ""]}, "invalid_value", "stop"),
    Row({"stop": ["a", "b", "c", "d", "e"]}, "invalid_value", "stop"),
    Row({"stop": "x" * 257}, "invalid_value", "stop"),
    Row({"stop": 5}, "invalid_type", "stop"),
    Row({"stop": ["a", 5]}, "invalid_type", "stop"),
    Row({"stop_token_ids": [259], "min_tokens": 2}, "invalid_value", "stop_token_ids[0]"),
    Row({"stop_token_ids": [5, -1], "min_tokens": 2}, "invalid_value", "stop_token_ids[1]"),
    Row({"stop_token_ids": [True]}, "invalid_type", "stop_token_ids[0]"),
    Row({"logit_bias": {"259": 5}}, "invalid_value", "logit_bias"),
    Row({"logit_bias": {"-1": 5}}, "invalid_value", "logit_bias"),
    Row({"logit_bias": {"abc": 5}}, "invalid_value", "logit_bias"),
    Row({"logit_bias": {"٣": 5}}, "invalid_value", "logit_bias"),
    Row({"logit_bias": {"5": 1000}}, "invalid_value", "logit_bias"),
    Row({"logit_bias": {"05": 1}}, "invalid_value", "logit_bias"),
    Row({"user": 5}, "invalid_type", "user"),
    Row({"metadata": "x"}, "invalid_type", "metadata"),
    Row({"parallel_tool_calls": 1}, "invalid_type", "parallel_tool_calls"),
    Row({"logit_bias": {str(i): 0 for i in range(301)}}, "invalid_value", "logit_bias"),
    Row({"logit_bias": {str(i): -100 for i in range(259)}}, "no_allowed_token", "logit_bias"),
    Row({"logit_bias": [1]}, "invalid_type", "logit_bias"),
    Row({"cache_salt": ""}, "invalid_value", "cache_salt"),
    Row({"cache_salt": "x" * 1025}, "invalid_value", "cache_salt"),
    Row({"stream_options": {"include_usage": True}}, "invalid_value", "stream_options"),
    Row({"stream_options": "junk", "stream": True}, "invalid_type", "stream_options"),
    Row(
        {"stream_options": {"include_usage": 1}, "stream": True},
        "invalid_type",
        "stream_options.include_usage",
    ),
]

CHAT_ONLY = [
    Row({"messages": []}, "invalid_value", "messages"),
    Row({"messages": {}}, "invalid_type", "messages"),
    Row({"messages": ["hi"]}, "invalid_type", "messages[0]"),
    Row({"messages": None}, "missing_required_parameter", "messages"),
    Row({"messages": [{"content": "hi"}]}, "missing_required_parameter", "messages[0].role"),
    Row({"messages": [*HI, {"role": "boss", "content": "hi"}]}, "invalid_value", "messages[1].role"),
    Row({"messages": [{"role": [], "content": "hi"}]}, "invalid_value", "messages[0].role"),
    Row({"messages": [{"role": "user", "content": None}]}, "invalid_type", "messages[0].content"),
    Row({"messages": [{"role": "user"}]}, "invalid_type", "messages[0].content"),
    Row({"messages": [{"role": "user", "content": []}]}, "invalid_value", "messages[0].content"),
    Row({"messages": [{"role": "user", "content": ["hi"]}]}, "invalid_type", "messages[0].content[0]"),
    Row({"messages": [{**HI[0], "nme": "x"}]}, "unknown_parameter", "messages[0].nme"),
    Row({"messages": [{**HI[0], "name": 5}]}, "invalid_type", "messages[0].name"),
    Row(
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "invalid_value",
        "messages[0].content[0].text",
    ),
    *(
        Row(
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, part]}]},
            "unsupported_content",
            "messages[0].content[1].type",
        )
        for part in (
            {"type": "image_url", "image_url": {"url": "http://127.0.0.1/x"}},
            {"type": "audio_url", "audio_url": {"url": "file:///etc/passwd"}},
            {"type": "file", "file": {"file_id": "x"}},
            {"type": "junk"},
            {},
        )
    ),
    Row({"messages": [{"role": "tool", "content": "1"}]}, "unsupported_parameter", "messages[0].role"),
    Row(
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": "x"}]}]},
        "unsupported_parameter",
        "messages[0].tool_calls",
    ),
    Row({"tools": []}, "unsupported_parameter", "tools"),
    Row({"truncation": "oldest"}, "invalid_value", "truncation"),
    Row({"truncation": "auto", "truncate_prompt_tokens": 5}, "invalid_value", "truncation"),
    Row({"best_of": 2}, "unsupported_parameter", "best_of"),
    Row({"tool_choice": "auto"}, "unsupported_parameter", "tool_choice"),
    Row({"modalities": ["audio"]}, "unsupported_parameter", "modalities"),
    Row({"web_search_options": {}}, "unsupported_parameter", "web_search_options"),
    Row({"prediction": {"type": "content"}}, "unsupported_parameter", "prediction"),
    Row({"echo": True}, "unsupported_parameter", "echo"),
    Row({"logprobs": 3}, "invalid_type", "logprobs"),
    Row({"top_logprobs": 3}, "invalid_value", "top_logprobs"),
    Row({"logprobs": False, "top_logprobs": 3}, "invalid_value", "top_logprobs"),
    Row({"logprobs": True, "top_logprobs": 21}, "invalid_value", "top_logprobs"),
    Row({"logprobs": True, "top_logprobs": -1}, "invalid_value", "top_logprobs"),
    Row({"max_completion_tokens": 0}, "invalid_value", "max_completion_tokens"),
    Row(
        {"continue_final_message": True, "add_generation_prompt": True},
        "invalid_value",
        "continue_final_message",
    ),
]

COMPLETIONS_ONLY = [
    Row({"prompt": None}, "missing_required_parameter", "prompt"),
    Row({"prompt": ""}, "invalid_value", "prompt"),
    Row({"prompt": [""]}, "invalid_value", "prompt"),
    Row({"prompt": []}, "invalid_value", "prompt"),
    Row({"prompt": [[]]}, "invalid_value", "prompt"),
    Row({"prompt": ["a", ""]}, "invalid_value", "prompt[1]"),
    Row({"prompt": 5}, "invalid_type", "prompt"),
    Row({"prompt": {"a": 1}}, "invalid_type", "prompt"),
    Row({"prompt": [-1]}, "invalid_value", "prompt[0]"),
    Row({"prompt": [3, 259]}, "invalid_value", "prompt[1]"),
    Row({"prompt": [2147483648]}, "invalid_value", "prompt[0]"),
    Row({"prompt": [9223372036854775808]}, "invalid_value", "prompt[0]"),
    Row({"prompt": [10**30]}, "invalid_value", "prompt[0]"),
    Row({"prompt": [1.5]}, "invalid_type", "prompt[0]"),
    Row({"prompt": [True]}, "invalid_type", "prompt[0]"),
    Row({"prompt": [5, "a"]}, "invalid_type", "prompt[1]"),
    Row({"prompt": ["a", 5]}, "invalid_type", "prompt[1]"),
    Row({"prompt": [[5], "a"]}, "invalid_type", "prompt[1]"),
    Row({"prompt": [[5], [True]]}, "invalid_type", "prompt[1][0]"),
    Row({"prompt": [[5], [None]]}, "invalid_type", "prompt[1][0]"),
    Row({"prompt": ["a"] * 33}, "invalid_value", "prompt"),
    Row({"prompt": "x" * 4096}, "context_length_exceeded", "prompt"),
    Row({"prompt": "x" * 100_000}, "context_length_exceeded", "prompt"),
    Row({"prompt": "x" * 4090, "max_tokens": 7}, "context_length_exceeded", "max_tokens"),
    Row({"logprobs": 21}, "invalid_value", "logprobs"),
    Row({"logprobs": 10000}, "invalid_value", "logprobs"),
    Row({"logprobs": -1}, "invalid_value", "logprobs"),
    Row({"logprobs": True}, "invalid_type", "logprobs"),
    Row({"best_of": 2, "n": 4}, "invalid_value", "best_of"),
    Row({"best_of": 1, "n": 2}, "invalid_value", "best_of"),
    Row({"best_of": 9}, "invalid_value", "best_of"),
    Row({"best_of": 0}, "invalid_value", "best_of"),
    Row({"suffix": "x"}, "unsupported_parameter", "suffix"),
    Row({"messages": HI}, "unsupported_parameter", "messages"),
]


def cases() -> list[Any]:
    rows = [(CHAT, row) for row in BOTH + CHAT_ONLY] + [(COMPLETIONS, row) for row in BOTH + COMPLETIONS_ONLY]
    return [pytest.param(path, row, id=f"{path[4:9]}-{json.dumps(row.fields)[:60]}") for path, row in rows]


@pytest.fixture(scope="module")
def router() -> Iterator[Stack]:
    """One router for all rows: what they do to it would show in the next one."""
    shared = stack()
    yield shared
    for path, body in ((CHAT, {"messages": HI}), (COMPLETIONS, {"prompt": "hi"})):
        assert call(shared.app, path, body).json()["choices"][0]["finish_reason"] == "stop"
    shared.service.close()


@pytest.mark.parametrize(("path", "row"), cases())
def test_bad_field(router: Stack, path: str, row: Row) -> None:
    good = {"messages": HI} if path == CHAT else {"prompt": "hi"}
    for stream in (False, True):
        wants_stream = "stream" in row.fields or row.param == "stream_options" or row.param == "best_of"
        extra = {"stream": True} if stream and not wants_stream else {}
        response = call(router.app, path, {**good, **extra, **row.fields})
        error = error_of(response)
        assert (response.status_code, error["code"], error["param"]) == (400, row.code, row.param), error
        assert error["type"] == "invalid_request_error"
        if row.param is not None and row.code != "context_length_exceeded":
            assert row.param.split("[")[0].split(".")[0] in error["message"]
    assert router.dispatcher.requests == []


def test_best_of_with_stream(router: Stack) -> None:
    response = call(router.app, COMPLETIONS, {"prompt": "a", "n": 1, "best_of": 3, "stream": True})
    assert (response.status_code, error_of(response)["param"]) == (400, "best_of")


def test_context_message_has_the_numbers(router: Stack) -> None:
    response = call(router.app, COMPLETIONS, {"prompt": "x" * 4000, "max_tokens": 1000})
    message = error_of(response)["message"]
    assert all(number in message for number in ("4000", "1000", "4096"))


RAW = [
    (b'{"prompt": "\\ud83d", "max_tokens": 1}', "invalid_json"),
    (b'{"prompt": "a", "stop": "\\ud83d"}', "invalid_json"),
    (b'{"prompt": "a", "user": "\\udd99"}', "invalid_json"),
    (b'{"prompt": "a", "temperature": NaN}', "invalid_json"),
    (b'{"prompt": "a", "temperature": -Infinity}', "invalid_json"),
    (b'{"prompt": "a", "temperature": 1e999}', "invalid_value"),
    (b'{"prompt": "a", "top_p": -1e999}', "invalid_value"),
    (b'{"prompt": "a", "logit_bias": {"5": NaN}}', "invalid_json"),
    (b'{"prompt": "a", "logit_bias": {"5": 1e999}}', "invalid_value"),
    (b'{"prompt": "a", "max_tokens": 1e30}', "invalid_type"),
    (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "invalid_json"),
    (b'{"prompt": "\xc3\x28"}', "invalid_json"),
    (b'{"prompt": ' + b"[" * 5000, "json_too_deep"),
    (b'{"prompt": "a", "max_tokens": 1, "max_tokens": 2}', "invalid_json"),
    (b'{"prompt": "a"', "invalid_json"),
    (b"", "invalid_json"),
    (b"[]", "invalid_type"),
]


@pytest.mark.parametrize(("raw", "code"), RAW, ids=[str(raw[:40]) for raw, _ in RAW])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/tokenize", "/detokenize"])
def test_bad_json(router: Stack, path: str, raw: bytes, code: str) -> None:
    response = call(router.app, path, raw=raw)
    error = error_of(response)
    assert response.status_code == 400
    if code.startswith(("invalid_json", "json")):
        assert error["code"] == code
    assert router.dispatcher.requests == []


def test_body_limits(router: Stack) -> None:
    app = router.app
    big = call(app, COMPLETIONS, raw=b'{"prompt": "' + b"x" * (4 << 20) + b'"}')
    assert (big.status_code, error_of(big)["code"]) == (413, "body_too_large")
    assert big.headers["connection"] == "close"
    plain = call(app, COMPLETIONS, raw=b"{}", headers={"content-type": "text/plain"})
    assert (plain.status_code, error_of(plain)["code"]) == (415, "unsupported_media_type")
    packed = call(app, COMPLETIONS, raw=b"{}", headers={"content-encoding": "gzip"})
    assert (packed.status_code, error_of(packed)["code"]) == (415, "unsupported_content_encoding")


@pytest.mark.parametrize("name", ["nope", "../../etc/passwd", "a\r\nb\x1b[31m", "x" * 10_000])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/tokenize"])
def test_unknown_model(router: Stack, path: str, name: str) -> None:
    response = call(router.app, path, {"model": name, "prompt": "a", "messages": HI})
    error = error_of(response)
    assert (response.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) < 300
    assert not any(ord(char) < 32 for char in error["message"])


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_all_nulls_mean_unset(path: str) -> None:
    router = stack(FakeDispatcher(says("hello")))
    good: dict[str, Any] = {"messages": HI} if path == CHAT else {"prompt": "hi"}
    schema = router.app.openapi()["paths"][path]["post"]["requestBody"]["content"]["application/json"][
        "schema"
    ]
    optional = {name: None for name in schema["properties"] if name not in good}
    more = dict.fromkeys(
        ["user", "metadata", "tools", "tool_choice", "best_of", "suffix", "store", "priority"]
    )
    assert len(optional) > 20
    plain = call(router.app, path, good).json()
    nulls = call(router.app, path, {**optional, **more, **good}).json()
    assert plain["choices"] == nulls["choices"] and plain["usage"] == nulls["usage"]
    first, second = router.dispatcher.requests
    assert first.sampling.seed != second.sampling.seed
    assert first.prompt_token_ids == second.prompt_token_ids
