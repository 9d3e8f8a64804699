"""Log-probabilities in OpenAI's two shapes. Numbers are always finite: JSON has no infinity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from router.text.tokenizer import TextTokenizer
from workers.types import TokenLogprob

FLOOR = -9999.0  # stands for minus infinity


def _finite(logprob: float) -> float:
    return logprob if logprob > FLOOR else FLOOR  # a NaN, too, becomes the floor


def chat_entry(tokenizer: TextTokenizer, entry: TokenLogprob, num_top: int) -> dict[str, Any]:
    """One entry of `logprobs.content`; `num_top` alternatives, best first."""
    return {
        **_chat_token(tokenizer, entry.token_id, entry.logprob),
        "top_logprobs": [_chat_token(tokenizer, id, logprob) for id, logprob in entry.top[:num_top]],
    }


def _chat_token(tokenizer: TextTokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    return {
        "token": tokenizer.text_of(token_id),
        "logprob": _finite(logprob),
        "bytes": list(tokenizer.bytes_of(token_id)),
    }


def completion_logprobs(
    tokenizer: TextTokenizer,
    token_ids: Sequence[int],
    entries: Sequence[TokenLogprob | None],
    offsets: Sequence[int],
    num_top: int,
) -> dict[str, Any]:
    """The `logprobs` of completions: parallel lists, one entry a token; null where nothing precedes the
    token.

    `offsets`: characters of the choice's text before each token. The chosen token is always among
    `top_logprobs`, as OpenAI has it, so an entry has up to `num_top` + 1 keys.
    """
    top: list[dict[str, float] | None] = []
    for entry in entries:
        if entry is None:
            top.append(None)
            continue
        best: dict[str, float] = {}
        for token_id, logprob in entry.top[:num_top]:
            best.setdefault(tokenizer.text_of(token_id), _finite(logprob))
        best.setdefault(tokenizer.text_of(entry.token_id), _finite(entry.logprob))
        top.append(best)
    return {
        "tokens": [tokenizer.text_of(token_id) for token_id in token_ids],
        "token_logprobs": [None if entry is None else _finite(entry.logprob) for entry in entries],
        "top_logprobs": top,
        "text_offset": list(offsets),
    }
