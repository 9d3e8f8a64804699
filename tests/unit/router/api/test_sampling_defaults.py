"""Sampling values of a checkpoint: which are taken, and when they apply."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from router.api.sampling_defaults import load_sampling_defaults
from router.build import build_service
from router.http.app import create_app
from router.settings import RouterSettings
from tests.unit.router.client import CHAT, COMPLETIONS, call
from tests.unit.router.fakes import MODEL, FakeDispatcher, Stack, byte_tokenizer

RECOMMENDED = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.1}


def stack(folder: Path, settings: RouterSettings) -> Stack:
    dispatcher = FakeDispatcher()
    service = build_service(dispatcher, byte_tokenizer(), settings, model_folder=str(folder))
    return Stack(create_app(service, settings), service, dispatcher)


def sampling(router: Stack, path: str, **fields: object) -> dict[str, float]:
    """The sampling values with which a request reaches the group."""
    body: dict[str, object] = (
        {"messages": [{"role": "user", "content": "a"}]} if path == CHAT else {"prompt": "a"}
    )
    assert call(router.app, path, {**body, **fields}).status_code == 200
    params = router.dispatcher.requests[-1].sampling
    return {name: float(getattr(params, name)) for name in RECOMMENDED}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_what_a_request_does_not_say_is_the_models(tmp_path: Path, path: str) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({**RECOMMENDED, "do_sample": True}))
    router = stack(tmp_path, RouterSettings(model_name=MODEL))
    assert sampling(router, path) == RECOMMENDED
    assert sampling(router, path, temperature=None, top_k=0, top_p=1.0) == {
        **RECOMMENDED,
        "top_k": 0,
        "top_p": 1.0,
    }
    openai = stack(tmp_path, RouterSettings(model_name=MODEL, sampling_defaults="openai"))
    assert sampling(openai, path) == {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    }


@pytest.mark.parametrize(
    ("text", "found", "warnings"),
    [
        (None, {}, []),
        ("[]", {}, ["is not used: it holds no JSON object"]),
        ("{", {}, ["is not used: Expecting property name"]),
        ('{"temperature": null, "eos_token_id": 2}', {}, []),
        (
            '{"temperature": 3.0, "top_k": "20", "top_p": 0.9}',
            {"top_p": 0.9},
            ["temperature is 3.0, which is not used", "top_k is '20', which is not used"],
        ),
    ],
)
def test_only_values_that_a_request_could_give_are_taken(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    text: str | None,
    found: dict[str, float],
    warnings: list[str],
) -> None:
    if text is not None:
        (tmp_path / "generation_config.json").write_text(text)
    assert load_sampling_defaults(str(tmp_path)) == found
    assert [said for said, part in zip(caplog.messages, warnings, strict=True) if part not in said] == []
