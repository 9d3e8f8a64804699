"""What the HTTP service asks of the placement side, as an interface: one implementation talks to groups over
sockets (`dispatcher`), another runs an engine in this process (tests)."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from router.routing.policy import Choice
from workers.types import GenerateRequest, GroupId, GroupInfo, GroupStats, RequestId, Role, TokenChunk


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
    role: Role = Role.UNIFIED
    is_leaving: bool = False  # it was told to end, and finishes what it has

    @property
    def can_answer(self) -> bool:
        """Whether requests are placed there; a prefill group only computes prompts for others."""
        return self.role is not Role.PREFILL


SOURCES = ("none", "prefill", "neighbour")  # kinds of groups to read blocks from
# How it ends that a prefill group is asked for a prompt; overtaken: the answer had begun without it.
PREFILL_OUTCOMES = ("computed", "refused", "failed", "overtaken", "cancelled")


@dataclass(slots=True, kw_only=True)
class Fetch:
    """Blocks of a prompt that a group reads from another one, and what came of it."""

    source: GroupId | None  # who was asked last; None: nobody any more, the group computes them itself
    wanted_tokens: int  # in blocks that the group lacked
    pulled_tokens: int | None = None  # of those; None until the first token
    # Prefill groups that were asked to compute the prompt, and which of PREFILL_OUTCOMES it came to.
    prefills: list[tuple[GroupId, str]] = field(default_factory=list)


class PairState(NamedTuple):
    """Two groups between which blocks have been read."""

    source: GroupId
    reader: GroupId
    num_reads: int  # that brought something
    num_failed: int
    bytes_per_s: float | None  # None: not measured yet
    num_bytes: int = 0  # that the reads brought


@dataclass(slots=True)
class FetchCounts:
    """What came of reading blocks from other groups, since the start."""

    sources: Counter[str] = field(default_factory=Counter)  # decisions, by SOURCES
    prefills: Counter[str] = field(default_factory=Counter)  # that have ended, by PREFILL_OUTCOMES
    redirects: Counter[str] = field(default_factory=Counter)  # by the new one of SOURCES
    pulled_tokens: int = 0  # read from another group
    recomputed_tokens: int = 0  # that should have been read, and were computed by the reader


@dataclass(slots=True)
class Decision:
    """Why a request went where it went."""

    request_id: RequestId
    num_attempts: int
    ranked: Sequence[Choice]  # of the last attempt, best first
    matches: Mapping[GroupId, int]  # leading blocks of the prompt that a group had or was about to have
    num_prompt_tokens: int
    taken_by: GroupId | None = None
    fetch: Fetch | None = None  # of the last attempt


class Dispatcher(Protocol):
    """Places requests on groups and streams their tokens back."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """Tokens of all choices as they come; ends after each choice has had its finish_reason.

        Closing the generator early cancels the request on its group. Raises Unavailable before the first
        chunk when no group can take it. A group that dies later shows as chunks with FinishReason.ERROR.
        """
        ...

    async def available(self, timeout_s: float) -> None:
        """Returns when a group is there that answers. Raises Unavailable after the time."""
        ...

    def groups(self) -> Sequence[GroupState]:
        """All groups known now, ready or not."""
        ...

    def pairs(self) -> Sequence[PairState]:
        """Groups between which blocks have been read, as far as this router knows."""
        ...

    def fetch_counts(self) -> FetchCounts:
        """What came of reading blocks: to read, not to change."""
        ...

    def explain(self, request_id: RequestId) -> Decision | None:
        """Why one of the last requests went where it went; None when it is not remembered."""
        ...
