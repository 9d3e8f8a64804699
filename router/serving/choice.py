"""One choice of an answer while its tokens come in: text, stop strings, log-probabilities, the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.serving.work import Work
from router.text.detokenizer import detokenizer
from router.text.stop import StopMatcher
from router.text.tokenizer import TextTokenizer
from workers.types import FinishReason, TokenChunk, TokenLogprob


@dataclass(slots=True)
class Delta:
    """What one chunk of tokens adds to a choice. Tokens of held-back text are here before their text is."""

    text: str = ""
    token_ids: Sequence[int] = ()
    # With log-probabilities only: one per token, and the characters of the choice's text before each.
    logprobs: Sequence[TokenLogprob | None] = ()
    offsets: Sequence[int] = ()
    finish_reason: str | None = None  # "stop" or "length"
    stop_reason: int | str | None = None  # the stop id or stop string


@dataclass(frozen=True, slots=True)
class PromptText:
    """A prompt as text, for `echo`, with the characters before each of its tokens."""

    text: str
    offsets: list[int]


def prompt_text(
    tokenizer: TextTokenizer, prompt: Sequence[int], *, is_all: bool, skip_special: bool
) -> PromptText:
    """The text of a prompt. `is_all`: nothing follows, so half a character at the end is given out too."""
    decoder = detokenizer(tokenizer, (), skip_special_tokens=skip_special)
    pieces: list[str] = []
    offsets: list[int] = []
    num_chars = 0
    for token_id in prompt:
        offsets.append(num_chars)
        pieces.append(decoder.add(token_id))
        num_chars += len(pieces[-1])
    if is_all:
        pieces.append(decoder.finish())
    return PromptText("".join(pieces), offsets)


class Choice:
    """Turns the chunks of one choice into deltas. `add` must not be called after the end."""

    def __init__(self, tokenizer: TextTokenizer, work: Work, prompt_index: int, index: int) -> None:
        self.index = index
        self.prompt_index = prompt_index
        self.num_tokens = 0
        self.is_finished = False
        self.first_token_at = self.last_token_at = 0.0  # for the gaps between tokens
        self._detokenizer = detokenizer(
            tokenizer, work.prompts[prompt_index], skip_special_tokens=work.skip_special_tokens
        )
        self._stops = StopMatcher(work.stops, include_stop=work.include_stop) if work.stops else None
        self._min_tokens = work.sampling[prompt_index].min_tokens
        self._include_stop = work.include_stop
        self._stop_token_ids = work.sampling[prompt_index].stop_token_ids
        self._num_chars = 0  # of all text decoded, given out or held

    @property
    def tpot_s(self) -> float | None:
        """Mean gap between its tokens; None when it has less than two."""
        gaps = self.num_tokens - 1
        return (self.last_token_at - self.first_token_at) / gaps if gaps > 0 else None

    def start_at(self, num_chars: int) -> None:
        """The choice's text begins with this many characters of the prompt."""
        self._num_chars = num_chars

    def add(self, chunk: TokenChunk) -> Delta:
        """Takes a chunk that is not an error."""
        delta = Delta(token_ids=chunk.token_ids)
        pieces: list[str] = []
        offsets: list[int] = []
        num_spoken = len(chunk.token_ids)
        if chunk.stop_token_id is not None and not self._include_stop:
            num_spoken -= 1  # the id that ended the choice is no part of its text
        for i, token_id in enumerate(chunk.token_ids):
            self.num_tokens += 1
            offsets.append(self._num_chars)
            if i < num_spoken and self._take(self._detokenizer.add(token_id), pieces, delta):
                delta.token_ids = chunk.token_ids[: i + 1]
                break
        if chunk.finish_reason is not None and not self.is_finished:
            self._end(chunk, pieces, delta)
        if chunk.logprobs is not None:
            delta.logprobs = chunk.logprobs[: len(offsets)]
            delta.offsets = offsets
        delta.text = pieces[0] if len(pieces) == 1 else "".join(pieces)
        return delta

    def _take(self, text: str, pieces: list[str], delta: Delta) -> bool:
        """Adds decoded text. Whether a stop string is complete."""
        self._num_chars += len(text)
        if self._stops is None or self.num_tokens < self._min_tokens:
            pieces.append(text)
            return False
        match = self._stops.add(text)
        pieces.append(match.text)
        if match.stop is None:
            return False
        self.is_finished = True
        delta.finish_reason, delta.stop_reason = "stop", match.stop
        return True

    def _end(self, chunk: TokenChunk, pieces: list[str], delta: Delta) -> None:
        if self._take(self._detokenizer.finish(), pieces, delta):
            return
        if self._stops is not None:
            pieces.append(self._stops.finish())
        self.is_finished = True
        delta.finish_reason = "stop" if chunk.finish_reason is FinishReason.STOP else "length"
        if chunk.stop_token_id in self._stop_token_ids:  # an end id of the model is no news
            delta.stop_reason = chunk.stop_token_id
