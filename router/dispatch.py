"""What the HTTP service asks of the placement side, as an interface: one implementation talks to groups over
sockets (`router.groups`), another runs an engine in this process (tests)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from router.policy import Choice
from workers.types import GenerateRequest, GroupId, GroupInfo, GroupStats, RequestId, TokenChunk


class Unavailable(Exception):
    """No group can take the request now. `retry_after_s` is when to try again."""

    def __init__(
        self, message: str, *, code: str = "server_is_overloaded", retry_after_s: float = 1.0
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupState:
    """A group as the router sees it now."""

    group_id: GroupId
    epoch: int
    info: GroupInfo | None  # None without a connection: it has said nothing of itself yet
    stats: GroupStats
    is_ready: bool  # connected, and a real token has come from it in this epoch


@dataclass(slots=True)
class Decision:
    """Why a request went where it went."""

    request_id: RequestId
    num_attempts: int
    ranked: Sequence[Choice]  # of the last attempt, best first
    matches: Mapping[GroupId, int]  # leading blocks of the prompt that a group had or was about to have
    num_prompt_tokens: int
    taken_by: GroupId | None = None


class Dispatcher(Protocol):
    """Places requests on groups and streams their tokens back."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """Tokens of all choices as they come; ends after each choice has had its finish_reason.

        Closing the generator early cancels the request on its group. Raises Unavailable before the first
        chunk when no group can take it. A group that dies later shows as chunks with FinishReason.ERROR.
        """
        ...

    def groups(self) -> Sequence[GroupState]:
        """All groups known now, ready or not."""
        ...

    def explain(self, request_id: RequestId) -> Decision | None:
        """Why one of the last requests went where it went; None when it is not remembered."""
        ...
