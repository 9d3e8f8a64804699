"""The vocabulary of a checkpoint as llguidance wants it: the bytes of every token.

From tokenizer.json alone, because reading it is a tenth of the work of building a tokenizer, all of which
holds the interpreter.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llguidance import LLTokenizer, TokenizerWrapper

from workers.regular_file import read_regular
from workers.token_bytes import TokenBytes

_MAX_BYTES = 512 << 20


class VocabularyUnknown(Exception):
    """The tokenizer of this folder does not say what its tokens stand for. Its message names the file."""


class _Tokens:
    """What `LLTokenizer` asks of a tokenizer. One more token than the model has stands for the end: how an
    answer ends is the engine's to say."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], special_ids: list[int]) -> None:
        self.tokens = [*tokens, b""]
        self.eos_token_id = len(tokens)
        self.special_token_ids = [*special_ids, self.eos_token_id]

    def __call__(self, _text: bytes) -> list[int]:
        """Tokens of a text; llguidance wants them to force text only, which it is told not to do."""
        return []


def read_vocabulary(folder: str | Path, vocab_size: int) -> LLTokenizer:
    """Of the ids 0 .. vocab_size - 1; vocab_size itself is the end of the text. Raises VocabularyUnknown."""
    file = Path(folder) / "tokenizer.json"
    try:
        config = json.loads(read_regular(file, max_bytes=_MAX_BYTES))
        names = _names(config["model"]["vocab"])
        special_ids = []
        for added in config.get("added_tokens") or ():
            names[added["id"]] = added["content"]
            if added.get("special"):
                special_ids.append(added["id"])
        table = TokenBytes(names.get, config.get("decoder") or {})
        tokens = [table[token_id] for token_id in range(vocab_size)]
        specials = [token_id for token_id in special_ids if token_id < vocab_size]
        wrapped = TokenizerWrapper(_Tokens(tokens, specials))
        return LLTokenizer(wrapped, n_vocab=vocab_size + 1, eos_token=vocab_size)
    except OSError as error:
        raise VocabularyUnknown(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise VocabularyUnknown(f"{file} does not tell the bytes of its tokens: {error}") from None


def _names(vocab: Mapping[str, int] | list[Any]) -> dict[int, str]:
    """Of a BPE or WordPiece model by name, of a Unigram model a list of [name, score]."""
    if isinstance(vocab, Mapping):
        return {token_id: name for name, token_id in vocab.items()}
    return {token_id: entry[0] for token_id, entry in enumerate(vocab)}
