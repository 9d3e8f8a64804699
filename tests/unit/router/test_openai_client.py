"""The official client against a server on loopback; answers also hold its own models in strict mode."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk, completion_create_params
from openai.types.completion_create_params import CompletionCreateParamsBase
from pydantic import BaseModel

from router.api.fields import ACCEPTED, UNSUPPORTED
from router.api.protocol import ChatRequest, CompletionRequest
from tests.unit.router.client import CHAT, COMPLETIONS, call, events, server, wait_until
from tests.unit.router.fakes import FakeDispatcher, Stack, says, stack

TEXT = "ok 🦙 fin"
HI: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def router() -> Stack:
    return stack(FakeDispatcher(says(TEXT, cached=16)))


@pytest.fixture(scope="module")
def url(router: Stack) -> Iterator[str]:
    with server(router) as base:
        yield base


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=20) as made:
        yield made


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="toy", messages=HI, logprobs=True, top_logprobs=2)
    choice = answer.choices[0]
    assert (choice.message.content, choice.message.role, choice.finish_reason) == (TEXT, "assistant", "stop")
    assert choice.logprobs and choice.logprobs.content and choice.logprobs.content[0].token == "o"
    assert answer.usage and answer.usage.prompt_tokens_details
    assert answer.usage.prompt_tokens_details.cached_tokens == 16


def test_chat_stream(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="toy", messages=HI, stream=True, n=2, stream_options={"include_usage": True}
    )
    texts = ["", ""]
    reasons: list[str | None] = [None, None]
    usage = None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert (texts, reasons) == ([TEXT, TEXT], ["stop", "stop"])
    assert usage and usage.completion_tokens == 2 * (len(TEXT.encode()) + 1)


def test_chat_stream_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="toy", messages=HI) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == TEXT


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="toy", prompt="a", max_tokens=40, echo=True, logprobs=1)
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason) == ("a" + TEXT, "stop")
    assert choice.logprobs and choice.logprobs.token_logprobs and choice.logprobs.token_logprobs[0] is None
    stream = client.completions.create(model="toy", prompt=[5, 6], max_tokens=40, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream if chunk.choices) == TEXT


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["toy"]
    assert client.models.retrieve("toy").id == "toy"


def test_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="nope", messages=HI)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    assert missing.value.request_id
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="toy", prompt="a", temperature=3)
    assert bad.value.param == "temperature"


def test_async_client_leaves(router: Stack, url: str) -> None:
    async def leave() -> None:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            stream = await client.completions.create(model="toy", prompt="a", stream=True)
            async for _ in stream:
                break
            await stream.close()

    before = router.dispatcher.num_cancelled
    router.dispatcher.gate = asyncio.Semaphore(3)
    try:
        asyncio.run(asyncio.wait_for(leave(), 20))
        wait_until(lambda: router.dispatcher.num_cancelled == before + 1)
    finally:
        router.dispatcher.gate = None


def test_connection_is_used_again(url: str) -> None:
    with httpx.Client(base_url=url) as client:
        body = {"prompt": "a", "stream": True}
        ports = set()
        for _ in range(3):
            with client.stream("POST", COMPLETIONS, json=body) as response:
                response.read()
                ports.add(response.extensions["network_stream"].get_extra_info("client_addr"))
        assert len(ports) == 1


def strictly(model: type[BaseModel], data: object) -> None:
    """Holds the client's model without casts; extra fields are ours to add."""
    model.model_validate_json(json.dumps(data), strict=True)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"n": 2, "max_tokens": 3},
    {"logprobs": True, "top_logprobs": 2},
    {"stop": "fi", "return_token_ids": True},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_chat_answers_hold_the_clients_models(router: Stack, options: dict[str, Any]) -> None:
    body = {"messages": HI, **options}
    strictly(ChatCompletion, call(router.app, CHAT, body).json())
    stream = {**body, "stream": True, "stream_options": {"include_usage": True}}
    for event in events(call(router.app, CHAT, stream).text)[:-1]:
        strictly(ChatCompletionChunk, event)


@pytest.mark.parametrize("options", OPTIONS)
def test_completions_hold_the_clients_models(router: Stack, options: dict[str, Any]) -> None:
    body = {"prompt": "a", "echo": True, **options}
    if body.pop("logprobs", None):
        body["logprobs"] = body.pop("top_logprobs")
    strictly(Completion, _without_first_null(call(router.app, COMPLETIONS, body).json()))
    body.pop("echo")
    for event in events(call(router.app, COMPLETIONS, {**body, "stream": True}).text)[:-1]:
        if event["choices"][0]["finish_reason"] is not None:
            strictly(Completion, event)
        else:  # the client has no type for a chunk: its finish_reason may be null there
            strictly(Completion, {**event, "choices": [{**event["choices"][0], "finish_reason": "stop"}]})


def _without_first_null(body: dict[str, Any]) -> dict[str, Any]:
    """With echo the first entry is null, which OpenAI sends and its own model forgot."""
    for choice in body["choices"]:
        if choice["logprobs"] is not None:
            for name in ("token_logprobs", "top_logprobs"):
                assert choice["logprobs"][name].pop(0) is None
    return body


def test_model_list_holds_the_clients_model(router: Stack) -> None:
    strictly(Model, call(router.app, "/v1/models/toy").json())


@pytest.mark.parametrize(
    ("params", "ours"),
    [
        (completion_create_params.CompletionCreateParamsBase, ChatRequest),
        (CompletionCreateParamsBase, CompletionRequest),
    ],
)
def test_every_field_of_the_client_is_known(params: Any, ours: type[BaseModel]) -> None:
    """So that none is answered with `unknown_parameter`: each is served, accepted or refused by name."""
    known = set(ours.model_fields) | set(ACCEPTED) | set(UNSUPPORTED)
    assert set(params.__annotations__) - known == set()
