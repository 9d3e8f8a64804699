"""Tokens on their way from a group's connection to the one reader of a request.

Every choice ends exactly once, whatever comes after.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from workers.types import GenerateRequest, TokenChunk, error_chunk

MAX_BUFFERED_VALUES = 262_144  # tokens and log-probabilities that a reader may leave untaken

_MERGE_AFTER = 64  # chunks that a reader is behind before they are merged into one per choice


class RequestStream:
    """Buffer of one attempt: pushed to by a connection, taken from by one reader."""

    def __init__(self, request: GenerateRequest) -> None:
        self.was_cut = False  # ended here, not by the group: it must be told to stop
        self._shown_id = request.request_id  # in the chunks that the reader gets, whatever the wire id
        most = max(request.sampling.max_tokens, 0)
        self._room = {choice: most - len(begun) for choice, begun in request.choices().items()}
        self._is_search = request.beam is not None  # whose tokens come at once, however fast they are read
        self._merge_above = _MERGE_AFTER + request.num_choices
        self._pending: list[TokenChunk] = []
        self._num_values = 0
        self._wakeup: asyncio.Future[None] | None = None

    @property
    def is_finished(self) -> bool:
        """Every choice has had its last chunk pushed (perhaps not taken)."""
        return not self._room

    @property
    def has_pending(self) -> bool:
        """Whether `take` returns at once."""
        return bool(self._pending)

    def push(self, chunk: TokenChunk) -> None:
        """Adds a chunk for the reader. Chunks of ended choices are dropped; a choice that gets more tokens
        than it may have, or whose reader is too far behind, ends with an error."""
        room = self._room.get(chunk.choice)
        if room is None:
            return
        if len(chunk.token_ids) > room:
            self._end_choice(chunk.choice, "protocol_error", "the group sent more tokens than were asked for")
            return
        if self._num_values > MAX_BUFFERED_VALUES:
            self.fail("client_too_slow", "the answer was not read fast enough")
            return
        self._room[chunk.choice] = room - len(chunk.token_ids)
        if chunk.finish_reason is not None:
            del self._room[chunk.choice]
        self._append(chunk)

    def fail(self, code: str, message: str) -> None:
        """Cuts every choice that has not ended."""
        for choice in list(self._room):
            self._end_choice(choice, code, message)

    async def take(self) -> list[TokenChunk]:
        """What has come since the last time, at least one chunk. Waits as long as it takes: queueing is
        legitimate, and a group that dies fails the stream."""
        while not self._pending:
            assert self._room, "take() after the end"
            self._wakeup = asyncio.get_running_loop().create_future()
            try:
                await self._wakeup
            finally:
                self._wakeup = None
        taken, self._pending = self._pending, []
        self._num_values = 0
        return taken

    def _end_choice(self, choice: int, code: str, message: str) -> None:
        del self._room[choice]
        self.was_cut = True
        self._append(error_chunk(self._shown_id, choice, code, message))

    def _append(self, chunk: TokenChunk) -> None:
        if chunk.request_id != self._shown_id:
            chunk = replace(chunk, request_id=self._shown_id)
        self._pending.append(chunk)
        self._num_values += 0 if self._is_search else _num_values(chunk)
        if len(self._pending) > self._merge_above:
            self._pending = merge(self._pending)
        if self._wakeup is not None and not self._wakeup.done():
            self._wakeup.set_result(None)


def merge(chunks: Sequence[TokenChunk]) -> list[TokenChunk]:
    """One chunk per choice with all that the given ones say, in order of the choices' first chunks."""
    by_choice: dict[int, list[TokenChunk]] = {}
    for chunk in chunks:
        by_choice.setdefault(chunk.choice, []).append(chunk)
    return [_merge_choice(parts) for parts in by_choice.values()]


def _merge_choice(parts: Sequence[TokenChunk]) -> TokenChunk:
    first, last = parts[0], parts[-1]
    has_logprobs = any(part.logprobs is not None for part in parts)
    return replace(
        first,
        token_ids=tuple(token for part in parts for token in part.token_ids),
        logprobs=tuple(entry for part in parts for entry in part.logprobs or ()) if has_logprobs else None,
        finish_reason=last.finish_reason,
        stop_token_id=last.stop_token_id,
        score=last.score,
        error=last.error,
        error_code=last.error_code,
    )


def _num_values(chunk: TokenChunk) -> int:
    """Without the prompt's log-probabilities, which come once, and as many as were asked for."""
    scores = sum(1 + len(entry.top) for entry in chunk.logprobs or ())
    return len(chunk.token_ids) + scores
