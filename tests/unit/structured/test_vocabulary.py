"""The bytes of a vocabulary, and what becomes of a tokenizer that does not tell them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from tests.models.toy_tokenizers import ascii_tokenizer, byte_tokenizer, metaspace_tokenizer
from workers.engine.grammars import AnswerEnd, GrammarRefused
from workers.structured.backend import LlguidanceBackend
from workers.types import Grammar, GrammarKind

LETTERS = Grammar(kind=GrammarKind.REGEX, text="[ab]c?")


def allowed(folder: Path, vocab_size: int, grammar: Grammar = LETTERS) -> set[int]:
    compiled = LlguidanceBackend(folder, vocab_size).compile(grammar)
    state = compiled.begin(AnswerEnd(token_ids=(1,), min_tokens=0), ())
    state.fill(())
    bits = state.bits(0)
    assert bits is not None
    return {token for token in range(8 * len(bits)) if bits[token >> 3] >> (token & 7) & 1}


@pytest.mark.parametrize("make", [byte_tokenizer, ascii_tokenizer, metaspace_tokenizer])
def test_tokens_stand_for_their_bytes(make: Callable[[], PreTrainedTokenizerFast], tmp_path: Path) -> None:
    tokenizer = make()
    tokenizer.save_pretrained(tmp_path)
    expected = set(tokenizer.convert_tokens_to_ids(["a", "b"]))
    assert allowed(tmp_path, len(tokenizer)) == expected
    assert allowed(tmp_path, len(tokenizer) + 70) == expected  # rows of weights without a token
    assert allowed(tmp_path, max(expected)) == expected - {max(expected)}


def test_a_space_of_sentencepiece(tmp_path: Path) -> None:
    tokenizer = metaspace_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    found = allowed(tmp_path, len(tokenizer), Grammar(kind=GrammarKind.REGEX, text=" (the|cat) ?"))
    assert found == set(tokenizer.convert_tokens_to_ids(["▁the", "▁cat", "▁"]))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "cannot be read"),
        ("{", "does not tell"),
        ("[]", "does not tell"),
        ('{"model": {"vocab": [1, 2]}}', "does not tell"),
        ('{"model": {"vocab": {"a": 0}}, "added_tokens": [7]}', "does not tell"),
        ('{"model": {"vocab": {"a": 0}}, "decoder": {"type": "WordPiece"}}', "WordPiece"),
    ],
)
def test_a_tokenizer_that_does_not_tell(content: str | None, problem: str, tmp_path: Path) -> None:
    """The group starts all the same; only requests with grammars are refused."""
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    backend = LlguidanceBackend(tmp_path, 8)
    backend.warm()
    with pytest.raises(GrammarRefused, match=problem) as refused:
        backend.compile(LETTERS)
    assert refused.value.code == "unsupported_parameter"
    assert str(tmp_path) in refused.value.message


def test_added_tokens_count(tmp_path: Path) -> None:
    config = {
        "decoder": {"type": "Fuse"},
        "model": {"vocab": {"a": 0, "b": 1}},
        "added_tokens": [{"id": 2, "content": "ac"}, {"id": 3, "content": "a", "special": True}],
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(config))
    assert allowed(tmp_path, 4) == {0, 1, 2}  # a special token is no text
