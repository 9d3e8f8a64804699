"""The JSON of answers: whole ones, and the chunks of a stream as server-sent events.

Order of a stream: one role chunk per choice (chat), token chunks, one chunk with the finish_reason per
choice, optionally one chunk with usage and no choices, `[DONE]`. All chunks share id, created and model, so
their beginning is encoded once; a token costs one `json.dumps` of its text. Everything is ASCII, so no line
of a stream can be invalid UTF-8.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from router.serving.choice import Delta, PromptText
from router.serving.logprobs import chat_entry, completion_logprobs
from router.serving.truncation import Truncation
from router.serving.work import Endpoint, Work
from router.text.tokenizer import TextTokenizer
from workers.types import TokenLogprob

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

_dumps = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


@dataclass(slots=True)
class Usage:
    """Tokens of an answer, over all its choices."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    truncation: Truncation | None = None  # of the prompts, where they might be cut

    def json(self) -> dict[str, Any]:
        """OpenAI's usage object, and what was cut of the prompts."""
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        if self.truncation is not None:
            usage["truncation"] = self.truncation.json()
        return usage


@dataclass(slots=True)
class PromptAnswer:
    """What an answer says of one prompt: its text for `echo`, its log-probabilities when both are asked
    for."""

    echo: PromptText | None = None
    logprobs: Sequence[TokenLogprob | None] | None = None


@dataclass(slots=True)
class ChoiceAnswer:
    """A choice, complete, as the sum of its deltas."""

    prompt_index: int
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob | None] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def mean_logprob(self) -> float:
        """Per token, of those that have one; -inf without any."""
        known = [entry.logprob for entry in self.logprobs if entry is not None]
        return sum(known) / len(known) if known else float("-inf")

    def add(self, delta: Delta) -> None:
        """The next delta of this choice."""
        self.text.append(delta.text)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.offsets += delta.offsets
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason


def best_answers(answers: Sequence[ChoiceAnswer], num_choices: int, num_best: int) -> list[ChoiceAnswer]:
    """Of every `num_choices` answers, one prompt's, the `num_best` with the highest log-probability per
    token (OpenAI's rule for best_of), best first; of equals the first."""
    best: list[ChoiceAnswer] = []
    for first in range(0, len(answers), num_choices):
        of_prompt = sorted(
            answers[first : first + num_choices], key=lambda answer: answer.mean_logprob, reverse=True
        )
        best += of_prompt[:num_best]
    return best


class AnswerWriter:
    """Writes the answer to one piece of work, whole or as events."""

    def __init__(self, tokenizer: TextTokenizer, work: Work, model: str) -> None:
        self._tokenizer = tokenizer
        self._work = work
        self._is_chat = work.endpoint is Endpoint.CHAT
        self._top: dict[str, Any] = {
            "id": f"{work.endpoint.value}-{work.id}",
            "object": "chat.completion" if self._is_chat else "text_completion",
            "created": work.created,
            "model": model,
            "system_fingerprint": f"fp_{work.limits.model_hash[:16]}" if work.limits.model_hash else None,
        }
        chunk_top = {**self._top, "object": "chat.completion.chunk"} if self._is_chat else self._top
        self._head = f"data: {_dumps(chunk_top)[:-1]},"
        self._fixed_tail = ',"usage":null}\n\n' if work.include_usage else "}\n\n"

    # Whole answers.

    def whole(self, prompts: Sequence[PromptAnswer], choices: Sequence[ChoiceAnswer], usage: Usage) -> bytes:
        """The body of a non-streaming answer. With log-probabilities it may be megabytes: written choice by
        choice, since the encoder lets no other thread run."""
        written = ",".join(
            _dumps(self._whole_choice(i, choice, prompts[choice.prompt_index]))
            for i, choice in enumerate(choices)
        )
        has_prompt_ids = self._is_chat and self._work.return_token_ids
        ids = f',"prompt_token_ids":{_dumps(self._work.prompts[0])}' if has_prompt_ids else ""
        body = f'{_dumps(self._top)[:-1]},"choices":[{written}],"usage":{_dumps(usage.json())}{ids}}}'
        return body.encode("ascii")

    def _whole_choice(self, index: int, choice: ChoiceAnswer, prompt: PromptAnswer) -> dict[str, Any]:
        body: dict[str, Any] = {"index": index}
        text = "".join(choice.text)
        if self._is_chat:
            body["message"] = {"role": "assistant", "content": text, "refusal": None}
            body["logprobs"] = self._chat_logprobs(choice.logprobs)
        else:
            echo = prompt.echo
            body["text"] = text if echo is None else echo.text + text
            body["logprobs"] = self._echoed_logprobs(choice.prompt_index, prompt, choice)
        body["finish_reason"] = choice.finish_reason
        body["stop_reason"] = choice.stop_reason
        if self._work.return_token_ids:
            body["token_ids"] = choice.token_ids
            if not self._is_chat:
                body["prompt_token_ids"] = self._work.prompts[choice.prompt_index]
        return body

    def _chat_logprobs(self, entries: Sequence[TokenLogprob | None]) -> dict[str, Any] | None:
        wanted = self._work.num_logprobs
        if wanted is None:
            return None
        content = [chat_entry(self._tokenizer, entry, wanted) for entry in entries if entry is not None]
        return {"content": content, "refusal": None}

    def _echoed_logprobs(
        self, prompt_index: int, prompt: PromptAnswer, delta: Delta | ChoiceAnswer
    ) -> dict[str, Any] | None:
        """Of the prompt when it is echoed, then of the delta's tokens."""
        wanted = self._work.num_logprobs
        if wanted is None:
            return None
        token_ids: list[int] = []
        entries: list[TokenLogprob | None] = []
        offsets: list[int] = []
        if prompt.echo is not None and prompt.logprobs is not None:
            token_ids += self._work.prompts[prompt_index]
            entries += prompt.logprobs
            offsets += prompt.echo.offsets
        return completion_logprobs(
            self._tokenizer,
            [*token_ids, *delta.token_ids],
            [*entries, *delta.logprobs],
            [*offsets, *delta.offsets],
            wanted,
        )

    # Streams.

    def _tail(self, usage: Usage) -> str:
        """The end of every chunk: its usage so far, if that is asked for."""
        if self._work.continuous_usage:
            return f',"usage":{_dumps(usage.json())}}}\n\n'
        return self._fixed_tail

    def begin(self, index: int, prompt_index: int, prompt: PromptAnswer, usage: Usage) -> bytes:
        """The first event of a choice: chat's role chunk; of completions the echoed prompt, if asked for."""
        ids = ""
        if self._work.return_token_ids:
            ids = f',"prompt_token_ids":{_dumps(self._work.prompts[prompt_index])}'
        if self._is_chat:
            delta = (
                f'"choices":[{{"index":{index},"delta":{{"role":"assistant","content":""}},"logprobs":null'
            )
            return f'{self._head}{delta},"finish_reason":null}}]{ids}{self._tail(usage)}'.encode("ascii")
        if prompt.echo is None and not self._work.return_token_ids:
            return b""
        text = "" if prompt.echo is None else prompt.echo.text
        logprobs = _dumps(self._echoed_logprobs(prompt_index, prompt, Delta()))
        return (
            f'{self._head}"choices":[{{"index":{index},"text":{_dumps(text)},"logprobs":{logprobs},'
            f'"finish_reason":null{ids}}}]{self._tail(usage)}'
        ).encode("ascii")

    def tokens(self, index: int, delta: Delta, usage: Usage) -> bytes:
        """The event of some tokens; empty when there is nothing to tell."""
        details = self._work.num_logprobs is not None or self._work.return_token_ids
        if not delta.text and not (details and delta.token_ids):
            return b""
        text = _dumps(delta.text)
        content = f'"delta":{{"content":{text}}}' if self._is_chat else f'"text":{text}'
        logprobs = "null" if self._work.num_logprobs is None else _dumps(self._delta_logprobs(delta))
        ids = f',"token_ids":{_dumps(delta.token_ids)}' if self._work.return_token_ids else ""
        return (
            f'{self._head}"choices":[{{"index":{index},{content},"logprobs":{logprobs},'
            f'"finish_reason":null{ids}}}]{self._tail(usage)}'
        ).encode("ascii")

    def _delta_logprobs(self, delta: Delta) -> dict[str, Any] | None:
        if self._is_chat:
            return self._chat_logprobs(delta.logprobs)
        return self._echoed_logprobs(0, PromptAnswer(), delta)

    def end(self, index: int, delta: Delta, usage: Usage) -> bytes:
        """The event with a choice's finish_reason."""
        content = '"delta":{}' if self._is_chat else '"text":""'
        return (
            f'{self._head}"choices":[{{"index":{index},{content},"logprobs":null,'
            f'"finish_reason":{_dumps(delta.finish_reason)},"stop_reason":{_dumps(delta.stop_reason)}}}]'
            f"{self._tail(usage)}"
        ).encode("ascii")

    def usage(self, usage: Usage) -> bytes:
        """The event with usage and no choices."""
        return f'{self._head}"choices":[],"usage":{_dumps(usage.json())}}}\n\n'.encode("ascii")


def error_event(body: bytes) -> bytes:
    """An error in the middle of a stream. Nothing may follow it, `[DONE]` neither."""
    return b"data: " + body + b"\n\n"
