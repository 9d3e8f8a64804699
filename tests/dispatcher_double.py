"""What doubles of the dispatcher have in common. Checked by mypy, so that a change of the interface shows."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

from router.dispatch.interface import (
    Decision,
    Dispatcher,
    FetchCounts,
    GroupState,
    PairState,
    RouteCounts,
)
from workers.types import GenerateRequest, RequestId, TokenChunk


class DispatcherDouble(Dispatcher):
    """Answers nothing, knows no group, has counted nothing. A double overrides what it is about."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """See `Dispatcher`."""
        raise NotImplementedError

    async def available(self) -> None:
        """See `Dispatcher`."""

    def groups(self) -> Sequence[GroupState]:
        """See `Dispatcher`."""
        return ()

    def pairs(self) -> Sequence[PairState]:
        """See `Dispatcher`."""
        return ()

    def fetch_counts(self) -> FetchCounts:
        """See `Dispatcher`."""
        return FetchCounts()

    def route_counts(self) -> RouteCounts:
        """See `Dispatcher`."""
        return RouteCounts()

    def explain(self, request_id: RequestId) -> Decision | None:
        """See `Dispatcher`."""
        return None
