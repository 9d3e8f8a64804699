"""Serve's choice of replica, taken from the ranking that the policy already made.

The dispatcher passes the ranked group ids with the call (`ranked_groups`); this adapter only puts Serve's
candidates in that order. Serve hangs a request for ever when `choose_replicas` raises, so whatever goes
wrong here falls back to Serve's own least-loaded choice among all candidates, and is counted.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from ray.util.metrics import Counter

from workers.group_start import group_id_of

_log = logging.getLogger(__name__)

RANKED_GROUPS = "ranked_groups"  # name of the keyword argument that carries the ranking


class Ordered(NamedTuple):
    """Candidates by preference, as batches that Serve tries one after the other."""

    batches: list[list[RunningReplica]]
    is_fallback: bool  # the ranking named none of the candidates


def order_candidates(candidates: Sequence[RunningReplica], ranked: Sequence[str]) -> Ordered:
    """One batch for each ranked candidate, then one of the others (Serve takes its least loaded)."""
    by_group: dict[str, RunningReplica] = {}
    for candidate in candidates:
        replica = candidate.replica_id
        by_group[group_id_of(replica.deployment_id.name, replica.unique_id)] = candidate
    batches = [[by_group.pop(group_id)] for group_id in ranked if group_id in by_group]
    is_fallback = not batches
    if by_group:
        batches.append(list(by_group.values()))
    return Ordered(batches, is_fallback)


class RankedRequestRouter(RequestRouter):
    """Serve's request router for worker groups."""

    def initialize_state(self, **kwargs: Any) -> None:
        """Called once by Serve; takes no settings."""
        self._fallbacks = Counter(
            "tandem_choice_fallbacks",
            description="Calls placed by Serve's least-loaded choice, because the ranking could not be used.",
            tag_keys=("reason",),
        )

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Serve calls this with keyword arguments of exactly these names."""
        reason = "unranked"
        try:
            ranked = pending_request.kwargs.get(RANKED_GROUPS) if pending_request is not None else None
            if ranked:
                ordered = order_candidates(candidate_replicas, ranked)
                if not ordered.is_fallback:
                    return ordered.batches
                reason = "ranked_groups_gone"
        except Exception:  # raising would hang the request
            reason = "error"
            _log.exception("ranking unusable, Serve chooses")
        self._count(reason)
        return [list(candidate_replicas)]

    def _count(self, reason: str) -> None:
        try:
            self._fallbacks.inc(tags={"reason": reason})
        except Exception:  # a metric must not hang the request either
            _log.exception("fallback not counted")
