"""Answers that follow a schema, a regular expression, a choice or a grammar, over HTTP and a real model."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from cluster.models.embedded import ensure
from tests.cases.conftest import VOCAB_SIZE
from tests.cases.schemas import random_schemas
from tests.cases.serving import Serving, serving
from tests.models.checkpoints import build, edit_json, family
from tests.models.toy_tokenizers import byte_tokenizer
from tests.unit.router.client import CHAT, COMPLETIONS, error_of
from workers.config import SpeculativeConfig

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
USER = [{"role": "user", "content": "Who?"}]


def schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, "strict": True}}


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a longer context."""
    folder = tmp_path_factory.mktemp("roomy")
    build(folder, family("llama"), vocab_size=VOCAB_SIZE, max_position_embeddings=2048)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def plain_server(roomy: Path) -> Iterator[Serving]:
    with serving(roomy) as server:
        yield server
        server.idle()


@pytest.fixture(scope="module")
def drafting_server(roomy: Path) -> Iterator[Serving]:
    """Guesses tokens from the text before; blocks of four tokens, steps of at most 32."""
    guessing = SpeculativeConfig(method="prompt_lookup", max_draft_tokens=6)
    with serving(roomy, block_size=4, max_step_tokens=32, num_blocks=2048, speculative=guessing) as server:
        yield server
        server.idle()


@pytest.fixture(scope="module")
def wordy_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A tiny model with the tokenizer of the embedded one; one token a block."""
    folder, embedded_folder = tmp_path_factory.mktemp("wordy"), ensure(lambda text: None)
    build(folder, family("llama"), vocab_size=49152, max_position_embeddings=2048)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(embedded_folder / name, folder)
    edit_json(folder / "config.json", eos_token_id=2)
    with serving(folder, block_size=1, num_blocks=8192) as server:
        yield server
        server.idle()


def test_chat_follows_a_schema_streamed_and_not(tiny_server: Serving) -> None:
    body = {"messages": USER, "response_format": schema_format(PERSON), "max_tokens": 150, "seed": 5}
    answer = tiny_server.both(CHAT, body)
    assert answer.finish_reason == "stop"
    jsonschema.validate(json.loads(answer.text), PERSON)


@pytest.mark.parametrize(
    "kind", [{"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}]
)
def test_any_json_object(tiny_server: Serving, kind: dict[str, Any]) -> None:
    """A model that has learnt nothing does not end an object of itself: favour the quotes and brackets."""
    bias = {str(tiny_server.tokenizer.encode(text)[-1]): 30.0 for text in ("}", '"', ":", "1")}
    body = {"prompt": "x", "max_tokens": 60, "temperature": 1.0, "seed": 3, "logit_bias": bias, **kind}
    choice = tiny_server.whole(COMPLETIONS, body)["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert isinstance(json.loads(choice["text"]), dict)


def test_choices_with_logprobs_and_several_answers(tiny_server: Serving) -> None:
    names = ["yes", "no", 'per"haps', "ü\n"]
    body = {"prompt": "Is it?", "structured_outputs": {"choice": names}, "n": 8, "seed": 1, "logprobs": 2}
    answer = tiny_server.whole(COMPLETIONS, body)
    texts = [choice["text"] for choice in answer["choices"]]
    assert set(texts) <= set(names) and len(set(texts)) > 1
    for choice in answer["choices"]:
        assert choice["finish_reason"] == "stop"
        tokens = choice["logprobs"]["tokens"]
        spoken = len(choice["text"].encode())  # one token a byte
        assert len(tokens) in (spoken, spoken + 1)  # and the id that ended it, if one did
    assert texts == [choice["text"] for choice in tiny_server.whole(COMPLETIONS, body)["choices"]]


@pytest.mark.parametrize(
    "pattern", [r"\d{3}-\d{4}", r"^(cat|dog){1,3}$", "a/b\\\\c", r"[äöü]{2,4}", "one\ntwo", r"[a-z]{3} .{2}"]
)
def test_regular_expressions(tiny_server: Serving, pattern: str) -> None:
    for seed in range(4):
        body = {"prompt": "Say:", "structured_outputs": {"regex": pattern}, "max_tokens": 40, "seed": seed}
        choice = tiny_server.whole(COMPLETIONS, body)["choices"][0]
        assert choice["finish_reason"] == "stop"
        assert re.fullmatch(pattern, choice["text"]), choice["text"]


def test_a_grammar(tiny_server: Serving) -> None:
    grammar = 'start: NUMBER ("+" NUMBER)~1..3\nNUMBER: /[1-9][0-9]{0,3}/'
    for seed in range(4):
        body = {"prompt": "Add", "structured_outputs": {"grammar": grammar}, "max_tokens": 40, "seed": seed}
        choice = tiny_server.whole(COMPLETIONS, body)["choices"][0]
        assert choice["finish_reason"] == "stop"
        assert re.fullmatch(r"[1-9]\d{0,3}(\+[1-9]\d{0,3}){1,3}", choice["text"])


def test_budgets_and_end_ids(tiny_server: Serving) -> None:
    """max_tokens cuts; min_tokens keeps the end away as long as something else may follow, no longer."""

    def ask(pattern: str, **fields: Any) -> dict[str, Any]:
        body = {"prompt": "b", "structured_outputs": {"regex": pattern}, "seed": 2, "return_token_ids": True}
        return dict(tiny_server.whole(COMPLETIONS, {**body, **fields})["choices"][0])

    cut = ask("a{20}", max_tokens=7)
    assert (cut["text"], cut["finish_reason"]) == ("a" * 7, "length")
    assert ask("a{5}", max_tokens=5)["finish_reason"] == "stop"
    long = ask("a+", max_tokens=30, min_tokens=12)
    assert len(long["text"]) >= 12 and set(long["text"]) == {"a"}
    short = ask("a{5}", max_tokens=30, min_tokens=12)
    assert (short["text"], short["finish_reason"], len(short["token_ids"])) == ("aaaaa", "stop", 5)
    endless = ask("a+", max_tokens=9, ignore_eos=True)
    assert (endless["text"], endless["finish_reason"]) == ("a" * 9, "length")
    whole = ask("a{5}", max_tokens=9, ignore_eos=True)
    assert (whole["text"], whole["finish_reason"], len(whole["token_ids"])) == ("aaaaa", "stop", 5)
    ends = tiny_server.tokenizer.encode("a")[-1:]
    first = ask("a{5}", max_tokens=9, stop_token_ids=ends)
    assert (first["finish_reason"], first["stop_reason"], len(first["token_ids"])) == ("stop", ends[0], 1)


def test_guesses_change_nothing(plain_server: Serving, drafting_server: Serving) -> None:
    """Other blocks, short steps, guessed tokens: the same answers, greedy and not."""
    pattern = r"(\{\"k\":(true|false),\"item\":\"[ab]{3}\"\},?){8}"
    for fields in ({"temperature": 0.0}, {"seed": 1}, {"seed": 2, "temperature": 0.5, "n": 3}):
        body = {
            "prompt": '{"k":true,"item":"aba"},{"k":false,"item":"aba"}' * 3,
            "structured_outputs": {"regex": pattern},
            "max_tokens": 200,
            **fields,
        }
        plain = plain_server.whole(COMPLETIONS, body)["choices"]
        assert plain == drafting_server.whole(COMPLETIONS, body)["choices"]
        assert all(re.fullmatch(pattern, choice["text"]) for choice in plain)
    stats = drafting_server.idle()
    assert stats.accepted_tokens_total > 100, stats


def valid_answers(server: Serving, schemas: Sequence[dict[str, Any]]) -> list[str]:
    """Asks for an answer to each and validates those that are whole; returns the reasons of their ends."""

    def ask(number: int) -> str:
        body = {
            "messages": USER,
            "response_format": schema_format(schemas[number]),
            "max_tokens": 600,
            "seed": number,
        }
        choice = server.whole(CHAT, body)["choices"][0]
        if choice["finish_reason"] == "stop":
            jsonschema.validate(json.loads(choice["message"]["content"]), schemas[number])
        return str(choice["finish_reason"])

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(ask, range(len(schemas))))


def test_one_in_five_of_two_hundred_schemas(wordy_server: Serving) -> None:
    reasons = valid_answers(wordy_server, random_schemas(200, seed=7)[::5])
    assert reasons.count("stop") >= 38, f"{reasons.count('length')} were cut"


@pytest.mark.structured
@pytest.mark.parametrize("which", ["wordy", "plain", "drafting"])
def test_two_hundred_schemas(which: str, request: pytest.FixtureRequest) -> None:
    """With blocks of 1, 16 and 4 tokens; the last with guesses."""
    server: Serving = request.getfixturevalue(f"{which}_server")
    reasons = valid_answers(server, random_schemas(200, seed=7))
    assert reasons.count("stop") >= 190, f"{reasons.count('length')} were cut"


def test_schemas_over_short_blocks_and_guesses(plain_server: Serving, drafting_server: Serving) -> None:
    schemas = random_schemas(16, seed=8)
    assert valid_answers(plain_server, schemas).count("stop") >= 15
    assert valid_answers(drafting_server, schemas).count("stop") >= 15


BAD = [
    ({"response_format": {"type": "json_schema"}}, "invalid_schema", "response_format.json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "invalid_schema",
        "response_format.json_schema.schema",
    ),
    (
        {"response_format": schema_format({"type": "no"})},
        "invalid_schema",
        "response_format.json_schema.schema",
    ),
    ({"structured_outputs": {"json": {"not": {}}}}, "invalid_schema", "structured_outputs.json"),
    ({"structured_outputs": {"json": {"$ref": "#"}}}, "invalid_schema", "structured_outputs.json"),
    ({"structured_outputs": {"regex": "(?=a)b"}}, "invalid_schema", "structured_outputs.regex"),
    ({"structured_outputs": {"grammar": 'start: "a" b'}}, "invalid_schema", "structured_outputs.grammar"),
    ({"structured_outputs": {"regex": "a" * 70_000}}, "invalid_schema", "structured_outputs.regex"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "invalid_value", "structured_outputs"),
    ({"structured_outputs": {}}, "invalid_value", "structured_outputs"),
    ({"structured_outputs": {"choice": []}}, "invalid_value", "structured_outputs.choice"),
    (
        {"structured_outputs": {"structural_tag": "x"}},
        "unsupported_parameter",
        "structured_outputs.structural_tag",
    ),
    (
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        "invalid_value",
        "structured_outputs",
    ),
    ({"guided_json": {}}, "unsupported_parameter", "guided_json"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "code", "param"), BAD)
def test_what_cannot_be_used(
    tiny_server: Serving, fields: dict[str, Any], code: str, param: str, stream: bool
) -> None:
    response = tiny_server.post(COMPLETIONS, {"prompt": "a", "stream": stream, **fields})
    assert response.status_code == 400, response.text
    error = error_of(response)
    assert (error["code"], error["param"]) == (code, param), error


def test_messages_name_the_problem(tiny_server: Serving) -> None:
    def message(**outputs: Any) -> str:
        response = tiny_server.post(COMPLETIONS, {"prompt": "a", "structured_outputs": outputs})
        assert response.status_code == 400
        return str(error_of(response)["message"])

    assert 'Unimplemented keys: ["not"]' in message(json={"not": {}})
    assert "minimum (5) is greater than maximum (3)" in message(
        json={"type": "integer", "minimum": 5, "maximum": 3}
    )
    assert "look-around" in message(regex="(?=a)b")
    assert 'line 2: unknown name: "c"' in message(grammar='start: "a" b\nb: c')
    assert "$ref # leads back to itself" in message(json={"$ref": "#"})
    assert "no answer can follow it" in message(grammar="start: x\nx: x")


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


HOSTILE: list[dict[str, Any]] = [
    {"regex": "a{1000000}"},
    {"regex": "((a{100}){100}){100}"},
    {"regex": "|".join(f"(.*{letter}.{{{20 + i}}})" for i, letter in enumerate("abcdefghij"))},
    {"regex": "(.*a){20}.*(b|c){20}(.*d.{30}){3}"},
    {"json": {"enum": [f"x{i}" for i in range(5000)]}},
    {"json": deep(25)},
    {"json": {"type": "integer", "multipleOf": 999999937}},
    {"json": {"type": "string", "pattern": "(.*a.{50}){10}"}},
    {"json": {"type": "array", "items": {"$ref": "#"}, "minItems": 1}},
    {"grammar": 'start: x\nx: x x x | "a"'},
    {"grammar": "start: (/[a-z]/~0..1000)~0..1000"},
    {"grammar": "start: A\nA: /(.*a.{12})/ & /(.*b.{13})/ & /(.*c.{14})/"},
]


def test_hostile_grammars_hold_nobody_up(tiny_server: Serving) -> None:
    """Each is refused, cut, or ends in an error that says why, while another answer goes on."""
    done = False
    gaps: list[float] = []

    def other() -> None:
        while not done:
            began = time.monotonic()
            tiny_server.whole(COMPLETIONS, {"prompt": "abc", "max_tokens": 8, "temperature": 0.0})
            gaps.append(time.monotonic() - began)

    with ThreadPoolExecutor(2) as pool:
        beside = pool.submit(other)
        try:
            for outputs in HOSTILE:
                began = time.monotonic()
                body = {"prompt": "x", "structured_outputs": outputs, "max_tokens": 100, "seed": 1}
                response = tiny_server.post(COMPLETIONS, body)
                assert time.monotonic() - began < 20, outputs
                if response.status_code != 200:
                    assert error_of(response)["code"] == "invalid_schema", (outputs, response.text)
        finally:
            done = True
        beside.result(20)
    assert len(gaps) > 10 and max(gaps) < 5
    tiny_server.idle()
