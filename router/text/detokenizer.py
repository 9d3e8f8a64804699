"""Token ids to text as they come, never half a character.

The text is what follows the prompt: prompt text + streamed text == decoding of prompt ids + generated ids.
Bytes of an unfinished character wait for the rest; only `finish` may turn them into U+FFFD, at the very end.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from router.text.tokenizer import TextTokenizer
from workers.token_bytes import TokenBytes

_CONTEXT_TOKENS = 8  # prompt tokens that a decoder without a byte table sees before the first new one


class Detokenizer(Protocol):
    """Incremental decoding of one choice."""

    def add(self, token_id: int) -> str:
        """The text that this token completes; may be empty."""
        ...

    def finish(self) -> str:
        """What is left: U+FFFD when the last character never became whole."""
        ...


def detokenizer(
    tokenizer: TextTokenizer, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool
) -> Detokenizer:
    """The detokenizer of a choice. An empty prompt means that the ids begin a text."""
    skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
    if tokenizer.token_bytes is not None:
        return _TableDetokenizer(tokenizer.token_bytes, skipped, prompt_token_ids)
    return _StreamDetokenizer(tokenizer.backend, prompt_token_ids[-_CONTEXT_TOKENS:], skip_special_tokens)


class _TableDetokenizer:
    """Joins the tokens' bytes and decodes them as UTF-8."""

    def __init__(self, table: TokenBytes, skipped: frozenset[int], prompt: Sequence[int]) -> None:
        self._table = table
        self._skipped = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strip = not prompt and table.strips_first_space
        # A prompt may end inside a character: at most three bytes, in at most three tokens.
        for token_id in prompt[-3:]:
            if token_id not in skipped:
                self._decoder.decode(table[token_id])

    def add(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        raw = self._table[token_id]
        if self._strip and raw:
            self._strip = False
            raw = raw.removeprefix(b" ")
        return self._decoder.decode(raw)

    def finish(self) -> str:
        return self._decoder.decode(b"", True)


class _StreamDetokenizer:
    """Asks the tokenizer, which decodes a window of the last tokens again for each new one."""

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._stream = DecodeStream(ids=list(context), skip_special_tokens=skip_special_tokens)
        self._settled = list(context)  # ids whose text has been given out, the last few
        self._waiting: list[int] = []

    def add(self, token_id: int) -> str:
        self._waiting.append(token_id)
        text = self._stream.step(self._tokenizer, token_id)
        if text is None:
            return ""
        self._settled = (self._settled + self._waiting)[-_CONTEXT_TOKENS:]
        self._waiting.clear()
        return text

    def finish(self) -> str:
        if not self._waiting:
            return ""
        before = self._tokenizer.decode(self._settled, skip_special_tokens=self._skip)
        after = self._tokenizer.decode(self._settled + self._waiting, skip_special_tokens=self._skip)
        self._waiting.clear()
        return after[len(before) :]
