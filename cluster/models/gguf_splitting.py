"""How the byte-level tokenizers that GGUF names in `tokenizer.ggml.pre` split a text before their merges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Splitting:
    """What comes before the merges."""

    pre_tokenizer: Callable[[], pre_tokenizers.PreTokenizer]
    normalizer: Callable[[], normalizers.Normalizer] | None = None
    ignores_merges: bool = False  # a word that is in the vocabulary is one token, whatever the merges say


def _smollm() -> pre_tokenizers.PreTokenizer:
    """Each digit alone, then GPT-2's split into words."""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


def _words(digits: str) -> pre_tokenizers.PreTokenizer:
    pattern = Regex(_WORDS.replace("DIGITS", digits))
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _llama3() -> pre_tokenizers.PreTokenizer:
    return _words(r"\p{N}{1,3}")


def _qwen2() -> pre_tokenizers.PreTokenizer:
    return _words(r"\p{N}")


SPLITTINGS = {
    "smollm": Splitting(pre_tokenizer=_smollm),
    "llama-bpe": Splitting(pre_tokenizer=_llama3, ignores_merges=True),
    "qwen2": Splitting(pre_tokenizer=_qwen2, normalizer=normalizers.NFC),
}
