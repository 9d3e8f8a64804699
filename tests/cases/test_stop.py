"""Where an answer ends: stop strings over many tokens, several end ids and ignoring them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cases.serving import CHAT, COMPLETIONS, Serving, serving
from tests.models.checkpoints import pos_script
from tests.models.oracle import Oracle
from tests.models.toy_tokenizers import byte_tokenizer

TEXT = "alpha beta gamma delta epsilon"
MESSAGES = [{"role": "user", "content": "go:"}]


@pytest.fixture(scope="module", params=[COMPLETIONS, CHAT])
def scripted(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Serving]]:
    path: str = request.param
    tokenizer = byte_tokenizer()
    chat = tokenizer.apply_chat_template(
        MESSAGES, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    folder = pos_script(
        tmp_path_factory.mktemp("stop"),
        [*tokenizer(TEXT).input_ids, 1],
        prompt_len=len(chat) if path == CHAT else 3,
        tokenizer=tokenizer,
        n_positions=128,
    )
    with serving(folder) as server:
        yield path, server


@pytest.mark.parametrize(
    ("stop", "right"),
    [(["beta gam"], "alpha "), (["beta gamma zeta"], TEXT), (["epsilon!"], TEXT), ("alpha", "")],
)
def test_stop_strings(scripted: tuple[str, Serving], stop: Any, right: str) -> None:
    path, server = scripted
    start = {"messages": MESSAGES} if path == CHAT else {"prompt": "go:"}
    answer = server.both(path, {**start, "max_tokens": 64, "temperature": 0, "stop": stop})
    assert (answer.text, answer.finish_reason) == (right, "stop")
    given_out = ""
    for delta in answer.deltas:
        given_out += delta
        assert right.startswith(given_out)
    server.idle()


@pytest.mark.parametrize(
    ("generation", "config", "right"),
    [([1, 2], None, "A"), (None, [1, 2], "A"), (2, 1, "A")],
    ids=["generation_config", "config only", "both"],
)
def test_end_ids(tmp_path: Path, generation: Any, config: Any, right: str) -> None:
    tokenizer = byte_tokenizer()
    a, b, c = tokenizer("ABC").input_ids
    folder = pos_script(tmp_path, [a, 2, b, 1, c, c, c, c, c, c], prompt_len=2, tokenizer=tokenizer)
    _write_eos(folder / "config.json", config)
    if generation is None:
        (folder / "generation_config.json").unlink()
    else:
        _write_eos(folder / "generation_config.json", generation)
    # generation_config.json where it exists, else config.json: as transformers' generate.
    ends = generation if generation is not None else config
    reference = Oracle(folder).continuation(tokenizer("go").input_ids, 10, eos_token_id=ends).token_ids
    with serving(folder) as server:
        body = {"prompt": "go", "max_tokens": 10, "temperature": 0}
        answer = server.both(COMPLETIONS, body)
        assert (answer.text, answer.finish_reason) == (right, "stop")
        assert server.ids(body) == reference
        longer = server.both(COMPLETIONS, {**body, "ignore_eos": True})
        assert (longer.finish_reason, longer.usage["completion_tokens"]) == ("length", 10)
        assert longer.text == "ABCCCCCC"


def _write_eos(file: Path, eos: Any) -> None:
    content = json.loads(file.read_text())
    content.pop("eos_token_id", None)
    file.write_text(json.dumps(content if eos is None else {**content, "eos_token_id": eos}))
