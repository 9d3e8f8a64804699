"""What the HTTP service asks of the placement side, as an interface: one implementation talks to groups over
sockets (`dispatcher`), another runs an engine in this process (tests)."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol

from router.routing.policy import Choice
from workers.histogram import HistogramCell, doubling
from workers.report import GroupReport
from workers.types import (
    GenerateRequest,
    GroupId,
    GroupInfo,
    GroupStats,
    RequestId,
    Role,
    StageTimes,
    TokenChunk,
)


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
    report: GroupReport = field(default_factory=GroupReport)

    @property
    def can_answer(self) -> bool:
        """Whether requests are placed there; a prefill group only computes prompts for others."""
        return self.role is not Role.PREFILL


class SourceKind(StrEnum):
    """Kinds of groups to read blocks from."""

    NONE = "none"
    PREFILL = "prefill"
    NEIGHBOUR = "neighbour"


class PrefillOutcome(StrEnum):
    """How it ends that a prefill group is asked for a prompt."""

    COMPUTED = "computed"
    REFUSED = "refused"
    FAILED = "failed"
    CRASHED = "crashed"
    OVERTAKEN = "overtaken"  # the answer had begun without it
    CANCELLED = "cancelled"


@dataclass(slots=True, kw_only=True)
class Fetch:
    """Blocks of a prompt that a group reads from another one, and what came of it."""

    source: GroupId | None  # who was asked last; None: nobody any more, the group computes them itself
    wanted_tokens: int  # in blocks that the group lacked
    pulled_tokens: int | None = None  # of those; None until the first token
    # Prefill groups that were asked to compute the prompt, and what it came to.
    prefills: list[tuple[GroupId, PrefillOutcome]] = field(default_factory=list)
    prefill_times: StageTimes | None = None  # of the one that has computed it


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

    sources: Counter[SourceKind] = field(default_factory=Counter)  # decisions
    prefills: Counter[PrefillOutcome] = field(default_factory=Counter)  # that have ended
    redirects: Counter[SourceKind] = field(default_factory=Counter)  # by the new source
    pulled_tokens: int = 0  # read from another group
    recomputed_tokens: int = 0  # that should have been read, and were computed by the reader


class DecisionReason(StrEnum):
    """Why a group was best."""

    SOURCE = "source"  # it reads blocks from another
    PREFIX = "prefix"  # it has some of the prompt itself
    LOAD = "load"  # it is just less busy
    RETRY = "retry"  # a better one had not taken the request


class RetryReason(StrEnum):
    """What the group before had done."""

    REFUSED = "refused"
    NO_ANSWER = "no_answer"
    FAILED = "failed"


class MoveResult(StrEnum):
    """What became of a request whose group ended."""

    MOVED = "moved"
    NO_GROUP = "no_group"
    GIVEN_UP = "given_up"


ROUTE_S = doubling(0.00001, 17)  # bounds of the histogram below: 10 us .. 0.65 s


@dataclass(slots=True)
class RouteCounts:
    """How requests were placed, since the start, and what placement knows to be cached."""

    seconds: HistogramCell = field(default_factory=lambda: HistogramCell(ROUTE_S))
    decisions: Counter[DecisionReason] = field(default_factory=Counter)
    retries: Counter[RetryReason] = field(default_factory=Counter)
    moves: Counter[MoveResult] = field(default_factory=Counter)
    predicted_tokens: int = 0  # taken to be cached at the group chosen
    index_blocks: int = 0  # now, of all groups
    index_stored: int = 0  # log entries
    index_removed: int = 0
    index_gaps: int = 0


@dataclass(slots=True)
class Decision:
    """Why a request went where it went."""

    request_id: RequestId
    ranked: Sequence[Choice]  # of the last attempt, best first
    matches: Mapping[GroupId, int]  # leading blocks of the prompt that a group had or was about to have
    num_prompt_tokens: int  # with those that the answer had before a move
    is_retry: bool = False  # a better group had not taken it
    num_attempts: int = 1  # offers to a group so far, with those before a move
    taken_by: GroupId | None = None
    fetch: Fetch | None = None  # of the last attempt
    route_s: float = 0.0  # from the tokenized prompt, or the end of its group, to its last offer
    num_moves: int = 0  # from groups that ended before the answer did


class Dispatcher(Protocol):
    """Places requests on groups and streams their tokens back."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """Tokens of all choices as they come; ends after each choice has had its finish_reason.

        Closing the generator early cancels the request on its group. Raises Unavailable before the first
        chunk when no group can take it. When its group ends, the request goes on in another one; where none
        can, that shows as chunks with FinishReason.ERROR.
        """
        ...

    async def available(self) -> None:
        """Returns when a group is there that answers. Raises Unavailable: at once when none is on its way,
        else when none has come in time."""
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

    def route_counts(self) -> RouteCounts:
        """How requests were placed: to read, not to change."""
        ...

    def explain(self, request_id: RequestId) -> Decision | None:
        """Why one of the last requests went where it went; None when it is not remembered."""
        ...
