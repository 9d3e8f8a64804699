"""Text of streams: characters split over tokens, SentencePiece's first spaces."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cases.serving import CHAT, COMPLETIONS, Serving, serving
from tests.models.checkpoints import pos_script
from tests.models.toy_tokenizers import byte_tokenizer, metaspace_tokenizer

TEXT = "ok 🦙 żółć 漢字 👩‍🚀 fin"
SCRIPT = byte_tokenizer()(TEXT).input_ids
MESSAGES = [{"role": "user", "content": "Say it:"}]
PROMPT_LEN = {
    COMPLETIONS: len("Say it:"),
    CHAT: len(
        byte_tokenizer().apply_chat_template(
            MESSAGES, add_generation_prompt=True, tokenize=True, return_dict=False
        )
    ),
}
BODY: dict[str, dict[str, Any]] = {COMPLETIONS: {"prompt": "Say it:"}, CHAT: {"messages": MESSAGES}}


@pytest.fixture(scope="module", params=[COMPLETIONS, CHAT])
def scripted(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Serving]]:
    path: str = request.param
    folder = pos_script(
        tmp_path_factory.mktemp("script"),
        [*SCRIPT, 1],
        prompt_len=PROMPT_LEN[path],
        tokenizer=byte_tokenizer(),
        n_positions=256,
    )
    with serving(folder) as server:
        yield path, server


def test_whole_text_without_half_characters(scripted: tuple[str, Serving]) -> None:
    path, server = scripted
    answer = server.both(path, {**BODY[path], "max_tokens": 80, "temperature": 0})
    assert answer.text == "".join(answer.deltas) == TEXT
    assert answer.finish_reason == "stop"
    assert not any("\ufffd" in delta for delta in answer.deltas)
    assert answer.usage["completion_tokens"] == len(SCRIPT) + 1


def test_cut_anywhere(scripted: tuple[str, Serving]) -> None:
    path, server = scripted
    for count in range(1, len(SCRIPT) + 1):
        answer = server.both(path, {**BODY[path], "max_tokens": count, "temperature": 0})
        assert answer.text == byte_tokenizer().decode(SCRIPT[:count])
        assert answer.text.count("\ufffd") <= 1 and "\ufffd" not in answer.text[:-1]
        assert answer.usage["completion_tokens"] == count
        assert answer.finish_reason == "length"
    server.idle()


def test_first_spaces(tmp_path: Path) -> None:
    tokenizer = metaspace_tokenizer()
    prompt = tokenizer("Who:").input_ids
    script = [3, 4, 5, 6, 7]  # ▁the ▁cat ▁sat down ▁!
    folder = pos_script(tmp_path, [*script, 1], prompt_len=len(prompt), tokenizer=tokenizer)
    with serving(folder) as server:
        body = {"prompt": "Who:", "max_tokens": 8, "temperature": 0}
        whole = tokenizer.decode(prompt + script)
        assert whole == "Who: the cat satdown !"
        assert "Who:" + server.both(COMPLETIONS, body).text == whole
        assert server.both(COMPLETIONS, {**body, "echo": True}).text == whole
