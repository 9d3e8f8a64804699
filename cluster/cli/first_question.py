"""The question that proves a new deployment, and the same question for people to paste.

A model without a chat template, as base models are, is asked at `/v1/completions`: chat is refused there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from cluster.cli.terminal import CommandFailed
from cluster.replies import Reply, ask

QUESTION = "What is the capital of France?"
_MAX_TOKENS = 32
_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class FirstAnswer:
    """What was answered, by which model."""

    model: str
    text: str
    is_chat: bool  # False: the model has no chat template


def ask_first_question(url: str, headers: Mapping[str, str]) -> FirstAnswer:
    """Proves the whole path with the request that people will make. Raises CommandFailed."""
    try:
        with httpx.Client(base_url=url, trust_env=False, headers=headers) as client:
            model = str(_checked(_ask(client, "GET", "/v1/models"))["data"][0]["id"])
            options = {"model": model, "max_tokens": _MAX_TOKENS, "temperature": 0}
            chat = _ask(client, "POST", "/v1/chat/completions", {**options, **_messages()})
            if not _lacks_template(chat):
                text = _checked(chat)["choices"][0]["message"]["content"]
                return FirstAnswer(model, str(text).strip(), is_chat=True)
            plain = _ask(client, "POST", "/v1/completions", {**options, "prompt": QUESTION})
            text = _checked(plain)["choices"][0]["text"]
            return FirstAnswer(model, str(text).strip(), is_chat=False)
    except (httpx.HTTPError, KeyError, IndexError, TypeError, ValueError) as error:
        raise CommandFailed(f"{url} says it is ready but does not answer a request: {error}") from error


def curl_example(url: str, model: str, *, with_key: bool, is_chat: bool) -> str:
    """A request to paste into a shell."""
    key = " -H 'authorization: Bearer KEY'" if with_key else ""
    path = "chat/completions" if is_chat else "completions"
    body = json.dumps({"model": model, **(_messages() if is_chat else {"prompt": QUESTION})})
    return f"curl {url}/v1/{path} -H 'content-type: application/json'{key} \\\n  -d '{body}'"


def python_example(url: str, model: str, *, with_key: bool, is_chat: bool) -> str:
    """The same with the official client (`pip install openai`)."""
    key = "KEY" if with_key else "none"
    lines = ["from openai import OpenAI", f'client = OpenAI(base_url="{url}/v1", api_key="{key}")']
    if is_chat:
        lines += [
            "answer = client.chat.completions.create(",
            f'    model="{model}", messages=[{{"role": "user", "content": "{QUESTION}"}}])',
            "print(answer.choices[0].message.content)",
        ]
    else:
        lines += [
            f'answer = client.completions.create(model="{model}", prompt="{QUESTION}")',
            "print(answer.choices[0].text)",
        ]
    return "\n".join(lines)


def _messages() -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": QUESTION}]}


def _ask(client: httpx.Client, method: str, path: str, body: Mapping[str, Any] | None = None) -> Reply:
    return ask(client, method, path, timeout_s=_TIMEOUT_S, body=body)


def _checked(answer: Reply) -> Any:
    """Its JSON. Raises ValueError for a refusal and for what is no JSON."""
    if answer.status != 200:
        raise ValueError(f"status {answer.status}: {answer.text[:500]}")
    return answer.json()


def _lacks_template(answer: Reply) -> bool:
    """Whether chat was refused because the model has no chat template."""
    if answer.status != 400:
        return False
    error = answer.json()["error"]
    return bool(error["code"] == "unsupported_parameter" and error["param"] == "messages")
