"""Beam searches through the HTTP API: what a group is asked for, and what the client gets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from router.api.sampling_defaults import with_defaults
from tests.unit.router.client import CHAT, COMPLETIONS, call, error_of
from tests.unit.router.fakes import FakeDispatcher, byte_tokenizer, stack
from workers.types import (
    BeamParams,
    EarlyStopping,
    FinishReason,
    GenerateRequest,
    StageTimes,
    TokenChunk,
    TokenLogprob,
    error_chunk,
)

TEXTS = ("first one", "second", "third of them")
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    COMPLETIONS: {"prompt": "hi"},
}


def finds(request: GenerateRequest) -> Iterator[TokenChunk]:
    """All choices at once, at the end of the search; the first ends by itself."""
    for choice, text in enumerate(TEXTS[: request.num_choices]):
        ids = (*byte_tokenizer().encode(text), *((1,) if choice == 0 else ()))
        wants = request.sampling.num_logprobs is not None
        yield TokenChunk(
            request_id=request.request_id,
            choice=choice,
            token_ids=ids,
            logprobs=tuple(TokenLogprob(token_id=token, logprob=-0.5) for token in ids) if wants else None,
            num_cached_tokens=16,
            finish_reason=FinishReason.LENGTH if choice else FinishReason.STOP,
            stop_token_id=None if choice else 1,
            score=-0.5 - choice,
        )


def content(choice: dict[str, Any]) -> str:
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_the_best_n_of_a_search(path: str) -> None:
    router = stack(FakeDispatcher(finds))
    fields = {"use_beam_search": True, "n": 2, "best_of": 32, "length_penalty": 0, "early_stopping": "never"}
    answer = call(router.app, path, {**BODIES[path], **fields, "max_tokens": 20}).json()
    assert [content(choice) for choice in answer["choices"]] == list(TEXTS[:2])
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop", "length"]
    assert answer["usage"]["completion_tokens"] == len("first one") + 1 + len("second")
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 16
    (request,) = router.dispatcher.requests
    assert request.beam == BeamParams(width=32, length_penalty=0.0, early_stopping=EarlyStopping.NEVER)
    assert (request.num_choices, request.sampling.temperature) == (2, 0.0)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("value", "stopping"), [(True, EarlyStopping.YES), (False, EarlyStopping.NO), (None, EarlyStopping.NO)]
)
def test_without_best_of_the_width_is_n(path: str, value: bool | None, stopping: EarlyStopping) -> None:
    router = stack(FakeDispatcher(finds))
    fields = {"use_beam_search": True, "n": 3, "temperature": 0, "early_stopping": value}
    assert call(router.app, path, {**BODIES[path], **fields}).status_code == 200
    (request,) = router.dispatcher.requests
    assert request.beam == BeamParams(width=3, length_penalty=1.0, early_stopping=stopping)


def test_a_stop_string_cuts_the_text_of_what_was_found() -> None:
    router = stack(FakeDispatcher(finds))
    fields = {"use_beam_search": True, "n": 3, "stop": " o", "logprobs": 0}
    answer = call(router.app, COMPLETIONS, {"prompt": "hi", **fields}).json()
    assert [choice["text"] for choice in answer["choices"]] == ["first", "second", "third"]
    assert [choice["stop_reason"] for choice in answer["choices"]] == [" o", None, " o"]
    counts = [len(choice["logprobs"]["tokens"]) for choice in answer["choices"]]
    assert counts == [len("first o"), len("second"), len("third o")]
    assert answer["usage"]["completion_tokens"] == sum(counts)


def test_what_a_search_says_of_its_prompt_comes_before_its_tokens() -> None:
    def begins_and_finds(request: GenerateRequest) -> Iterator[TokenChunk]:
        yield TokenChunk(
            request_id=request.request_id,
            choice=0,
            num_cached_tokens=32,
            times=StageTimes(queue_s=0.0, transfer_s=0.0, compute_s=0.1),
            prompt_logprobs=(None, *(TokenLogprob(token_id=5, logprob=-2.0),) * (num_prompt - 1)),
        )
        for chunk in finds(request):
            yield replace(chunk, num_cached_tokens=16 if chunk.choice else 0)

    num_prompt = len(byte_tokenizer().encode("hi"))
    router = stack(FakeDispatcher(begins_and_finds))
    fields = {"use_beam_search": True, "n": 2, "echo": True, "logprobs": 0}
    answer = call(router.app, COMPLETIONS, {"prompt": "hi", **fields}).json()
    assert [choice["text"] for choice in answer["choices"]] == ["hi" + text for text in TEXTS[:2]]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 32
    for choice in answer["choices"]:
        assert choice["logprobs"]["token_logprobs"][:num_prompt] == [None, *[-2.0] * (num_prompt - 1)]


def test_nothing_is_searched_unasked() -> None:
    router = stack()
    assert call(router.app, COMPLETIONS, {"prompt": "hi", "use_beam_search": False}).status_code == 200
    assert router.dispatcher.requests[0].beam is None


def test_what_a_group_refuses_is_the_client_s() -> None:
    def refuses(request: GenerateRequest) -> Iterator[TokenChunk]:
        yield error_chunk(request.request_id, 0, "beam_width_too_large", "A beam search of width 64 ...")

    router = stack(FakeDispatcher(refuses))
    response = call(router.app, COMPLETIONS, {"prompt": "hi", "use_beam_search": True, "best_of": 64})
    assert (response.status_code, error_of(response)["code"]) == (400, "beam_width_too_large")


def test_a_model_s_sampling_defaults_are_for_sampling() -> None:
    defaults = {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.1}
    body = {"use_beam_search": True}
    assert with_defaults(body, defaults) == {"use_beam_search": True, "repetition_penalty": 1.1}
    assert with_defaults({"use_beam_search": False}, defaults) == {"use_beam_search": False, **defaults}
