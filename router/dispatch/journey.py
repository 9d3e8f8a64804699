"""A request on its way over several groups, when one that answers it ends before the answer does.

    placed -> tokens -> the group ends -> placed again, with the tokens so far -> tokens -> ...

What the reader gets goes on as if nothing had happened: a group computes the next token from prompt, tokens
so far, seed and position alone. A beam search, whose tokens come at its end, is made anew. Text, stop strings
and usage are made from what the reader gets, so they know nothing of it.

A group that was told to end (an update, fewer groups), or ended as it computed wrongly, costs its requests
nothing, however often. One that crashed may have been killed by one of them, which would then pull down one
group after the other. A request that does so does it again with its first step in the next group: there its
prompt and tokens so far are computed, and the token at which the group before has failed. So one that had got
nothing from the group is a suspect of its crash, and the others are not, whatever they had got elsewhere. (A
beam search has got something when it has begun; one that kills its groups later on is moved as often as
others, and no more.)

    suspects are tried one at a time, before all else that waits in their new group, and without a prefill
    group; while one is tried, a crash there is put down to it alone
    one that has been the suspect of MAX_SUSPICIONS crashes is not placed again
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from router.dispatch.attempts import CRASHED, DISTRUSTED, STOPPED, Attempt
from workers.types import BegunChoice, FinishReason, GenerateRequest, TokenChunk, error_chunk

MAX_SUSPICIONS = 2

_TRIAL_PRIORITY = -1_000  # others wait for the end of the trial


class Journey:
    """What one request has got, and what is still to come. Used by the one reader of the request."""

    def __init__(self, request: GenerateRequest) -> None:
        self._request = request
        self._tokens: dict[int, list[int]] = {choice: [] for choice in range(request.num_choices)}
        self._answered: set[int] = set()  # choices that have had a chunk
        self._unfinished = set(self._tokens)
        self._lost: TokenChunk | None = None  # the error with which the present group ended
        self._has_heard = False  # anything from the present group
        self.is_lost = False  # the present group has ended
        self.num_attempts = 0  # offers to a group
        self.num_moves = 0
        self.num_crashes = 0  # of groups that had it
        self.num_suspicions = 0  # crashes that it may have caused
        self.is_suspect = False  # of the last one

    @property
    def is_over(self) -> bool:
        """Every choice has ended."""
        return not self._unfinished

    @property
    def was_stopped(self) -> bool:
        """The last group was told to end."""
        return self._lost is not None and self._lost.error_code == STOPPED

    def take(self, chunk: TokenChunk) -> TokenChunk | None:
        """What the reader gets of a chunk. An error that the request may survive is kept back."""
        choice = chunk.choice
        if chunk.finish_reason is FinishReason.ERROR and chunk.error_code in (STOPPED, DISTRUSTED, *CRASHED):
            self._lost = chunk
            self.is_lost = True
            if not chunk.token_ids:
                return None
            chunk = replace(chunk, finish_reason=None, error=None, error_code=None)
        if self._request.beam is not None and choice not in self._unfinished:
            return None  # the search was made anew for those that had not come
        self._has_heard = True
        self._tokens[choice] += chunk.token_ids
        if chunk.finish_reason is not None:
            self._unfinished.discard(choice)
        if choice in self._answered and self.num_moves:  # said by the first group that had it
            return replace(chunk, num_cached_tokens=0, prompt_logprobs=None)
        self._answered.add(choice)
        return chunk

    def end_of_group(self, attempt: Attempt) -> None:
        """The group that had it is gone; counts the crash if it was one and is not another request's."""
        assert self.is_lost, "the answer ended without a word"
        self.is_suspect = False
        if self._lost is not None and self._lost.error_code not in CRASHED:
            return
        tried = attempt.owner.suspect if attempt.owner is not None else None
        if tried in (None, attempt.wire_id):
            self.num_crashes += 1
            self.is_suspect = not self._has_heard
            self.num_suspicions += self.is_suspect

    def move(self) -> GenerateRequest:
        """The request for the next group."""
        self.num_moves += 1
        self._has_heard = self.is_lost = False
        request = self._request
        if self.is_suspect:
            request = replace(request, priority=_TRIAL_PRIORITY)
        if 0 not in self._unfinished or 0 in self._answered:  # the reader has the prompt's scores
            request = replace(request, sampling=replace(request.sampling, num_prompt_logprobs=None))
        is_fresh = not any(self._tokens.values()) and len(self._unfinished) == len(self._tokens)
        if is_fresh or request.beam is not None:  # nothing has come of it, or it is made as a whole
            return request
        begun = tuple(
            BegunChoice(choice=choice, token_ids=tuple(self._tokens[choice]))
            for choice in sorted(self._unfinished)
        )
        return replace(request, begun=begun)

    def give_up(self, why: str) -> list[TokenChunk]:
        """The last chunks, when the request cannot go on."""
        assert self._lost is not None, "nothing has been lost"
        code, message = self._lost.error_code or "group_failed", self._lost.error or ""
        if self.num_suspicions >= MAX_SUSPICIONS:
            code = "request_quarantined"
            why = f"{self.num_crashes} groups failed while they had this request, so it is not tried again"
        text = f"{message}; {why}"
        return [
            error_chunk(self._request.request_id, choice, code, text) for choice in sorted(self._unfinished)
        ]


class Probation:
    """One suspect at a time. Lives on the router's event loop."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._on_trial: Journey | None = None

    @asynccontextmanager
    async def turn(self, journey: Journey) -> AsyncIterator[None]:
        """A suspect's turn begins inside; it ends with `over`, or here when an exception passes. Waits for
        those before it: each ends with its first token, or with its group."""
        if not journey.is_suspect:
            yield
            return
        await self._turn.acquire()
        self._on_trial = journey
        try:
            yield
        except BaseException:
            self.over(journey)
            raise

    def over(self, journey: Journey) -> None:
        """The suspect has got something from its group, or is not tried any more. May be called twice."""
        if self._on_trial is journey:
            self._on_trial = None
            self._turn.release()
