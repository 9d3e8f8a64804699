"""Whose request is whose: which client reads the tokens of which request, until its last choice has ended."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from workers.types import RequestId, TokenChunk


@dataclass(slots=True)
class _Live:
    client_id: str
    unfinished: set[int]  # choices
    arrived_s: float | None  # None: its first token has come, or is not to be timed


class LiveRequests:
    """Requests in the engine by client, and aborts that came before their request.

    An abort travels on the reader's connection, the request on the front's: either may come first.
    """

    def __init__(self, max_early_aborts: int) -> None:
        self._max_early_aborts = max_early_aborts
        self._live: dict[RequestId, _Live] = {}
        self._of_client: dict[str, set[RequestId]] = {}
        self._early_aborts: OrderedDict[RequestId, None] = OrderedDict()
        self.first_tokens_total = 0
        self.first_token_seconds_total = 0.0

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._live

    def add(
        self, request_id: RequestId, choices: Iterable[int], client_id: str, arrived_s: float | None = None
    ) -> None:
        """The client reads this request from now on. `arrived_s`: when, for the time to its first token."""
        assert request_id not in self._live
        self._live[request_id] = _Live(client_id, set(choices), arrived_s)
        self._of_client.setdefault(client_id, set()).add(request_id)

    def reader(self, request_id: RequestId) -> str | None:
        """Who reads the request; None when nobody does."""
        live = self._live.get(request_id)
        return live.client_id if live is not None else None

    def pass_on(self, chunk: TokenChunk, now_s: float) -> str | None:
        """The reader of a chunk. With the last chunk of the last choice the request is over."""
        live = self._live.get(chunk.request_id)
        if live is None:
            return None
        has_begun = chunk.times is not None and chunk.finish_reason is None  # a search, without tokens yet
        if live.arrived_s is not None and (chunk.token_ids or has_begun):
            self.first_tokens_total += 1
            self.first_token_seconds_total += now_s - live.arrived_s
            live.arrived_s = None
        if chunk.finish_reason is not None:
            live.unfinished.discard(chunk.choice)
            if not live.unfinished:
                self.remove(chunk.request_id)
        return live.client_id

    def unfinished(self, request_id: RequestId) -> set[int]:
        """Choices that have not ended."""
        live = self._live.get(request_id)
        return set(live.unfinished) if live is not None else set()

    def remove(self, request_id: RequestId) -> None:
        """Nobody reads the request any more; unknown ones are ignored."""
        live = self._live.pop(request_id, None)
        if live is not None:
            own = self._of_client[live.client_id]
            own.discard(request_id)
            if not own:
                del self._of_client[live.client_id]

    def of(self, client_id: str) -> list[RequestId]:
        """What a client reads."""
        return list(self._of_client.get(client_id, ()))

    def remember_abort(self, request_id: RequestId) -> None:
        """An abort of a request that is not here: not here yet, or not any more."""
        self._early_aborts[request_id] = None
        if len(self._early_aborts) > self._max_early_aborts:
            self._early_aborts.popitem(last=False)

    def take_abort(self, request_id: RequestId) -> bool:
        """Whether an abort of this request came before it; forgets it."""
        if request_id not in self._early_aborts:
            return False
        del self._early_aborts[request_id]
        return True
