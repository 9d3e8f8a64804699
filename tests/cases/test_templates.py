"""Chat templates: one beginning-of-sequence token, content as a list of parts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cases.serving import CHAT, COMPLETIONS, Serving, serving
from tests.models.checkpoints import build, family
from tests.models.oracle import Oracle
from tests.models.toy_tokenizers import ascii_tokenizer
from tests.unit.router.client import error_of


@pytest.fixture(scope="module")
def with_bos(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Serving, Oracle]]:
    """Template and tokenizer both write <s>."""
    folder: Path = build(tmp_path_factory.mktemp("bos"), family("llama"))
    ascii_tokenizer().save_pretrained(folder)
    with serving(folder) as server:
        yield server, Oracle(folder)


def check(server: Serving, oracle: Oracle, path: str, body: dict[str, Any], ids: list[int]) -> None:
    answer = server.both(path, {**body, "max_tokens": 8, "temperature": 0})
    assert answer.usage["prompt_tokens"] == len(ids)
    reference = oracle.continuation(ids, 8)
    assert reference.margin > 1e-3
    assert answer.text == ascii_tokenizer().decode(reference.token_ids, skip_special_tokens=True)


def test_one_bos(with_bos: tuple[Serving, Oracle]) -> None:
    server, oracle = with_bos
    tokenizer = ascii_tokenizer()
    messages = [{"role": "user", "content": "hi"}]
    chat = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert chat.count(0) == 1
    check(server, oracle, CHAT, {"messages": messages}, chat)
    check(server, oracle, COMPLETIONS, {"prompt": "hi"}, tokenizer("hi").input_ids)
    typed = tokenizer("<s>hi").input_ids
    assert typed[:2] == [0, 0]
    check(server, oracle, COMPLETIONS, {"prompt": "<s>hi"}, typed)


def test_parts_are_joined_by_a_newline(tiny_server: Serving) -> None:
    def ask(content: Any) -> tuple[str, int]:
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 12, "temperature": 0}
        answer = tiny_server.whole(CHAT, body)
        return answer["choices"][0]["message"]["content"], answer["usage"]["prompt_tokens"]

    parts = ask([{"type": "text", "text": "alpha"}, {"type": "text", "text": "beta"}])
    assert parts == ask("alpha\nbeta")
    assert all(parts != ask(other) for other in ("alphabeta", "alpha beta", "beta"))


@pytest.mark.parametrize(
    ("content", "names"),
    [
        ([{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "data:,"}}], "image_url"),
        ([{"type": "text"}], "text"),
        ([], "content"),
    ],
)
def test_bad_parts(tiny_server: Serving, content: Any, names: str) -> None:
    response = tiny_server.post(CHAT, {"messages": [{"role": "user", "content": content}]})
    assert response.status_code == 400
    assert names in error_of(response)["message"]
