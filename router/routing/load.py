"""What a router knows of one group's load: its own stats, plus what this router has sent since.

A request is charged to the group from the moment it is sent until the group's stats must include it: its
first token has come, or two STATS frames after the group accepted it (the first may be of a step that had
begun before). Without this a burst within one stats period would all go to the same group.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp2

from router.routing.policy import GroupLoad
from workers.types import GroupId, GroupStats, RequestId, Role

_MIN_OBSERVED_TOKENS = 128  # less than this says more about the length of a step than about the rate
_LEARNING_RATE = 0.2  # least share of a new observation in the mean; the first ones count fully
_DOUBTED_RATES = 2  # observations that the mean of all groups weighs against a group's own
_RECENT_HALF_LIFE_S = 300.0
_STATS_UNTIL_COUNTED = 2


@dataclass(slots=True)
class _Sent:
    """A request that this router has sent and that is not finished."""

    uncached_tokens: int
    tokens_before: int  # queued before it when it was sent
    sent_s: float
    is_timed: bool  # its first token shows how fast the group computes
    is_accepted: bool = False
    num_stats: int = 0  # STATS since it was accepted
    has_token: bool = False


class LoadTracker:
    """Load of one group over one connection. Times are seconds of the caller's monotonic clock."""

    def __init__(
        self,
        group_id: GroupId,
        block_size: int,
        num_blocks: int,
        *,
        role: Role = Role.UNIFIED,
        kv_format: str = "",
        block_bytes: int = 0,
        context_token_s: float = 0.0,
    ) -> None:
        """What the group is, as `GroupLoad` has it."""
        self._view = GroupLoad(
            group_id=group_id,
            block_size=block_size,
            available_blocks=num_blocks,
            role=role,
            kv_format=kv_format,
            block_bytes=block_bytes,
            context_token_s=context_token_s,
        )
        self._stats = GroupStats(free_blocks=num_blocks)
        self._sent: dict[RequestId, _Sent] = {}
        self._charged: dict[RequestId, _Sent] = {}  # of those, the ones that the stats do not include yet
        self._num_rates = 0  # observations in it
        self._recent_requests = 0.0
        self._recent_s = 0.0  # when _recent_requests was true

    @property
    def stats(self) -> GroupStats:
        """The last ones that came."""
        return self._stats

    @property
    def num_requests(self) -> int:
        """Requests of this router there, unfinished."""
        return len(self._sent)

    def on_stats(self, stats: GroupStats) -> None:
        """The group has reported."""
        self._stats = stats
        view = self._view
        view.step_s = stats.step_seconds or None
        view.waiting_tokens = stats.waiting_tokens
        view.running_tokens = stats.running_tokens
        view.num_running = stats.num_running
        view.num_waiting = stats.num_waiting
        view.available_blocks = stats.free_blocks + stats.cached_blocks
        view.active_blocks = stats.active_blocks
        for request_id, sent in list(self._charged.items()):
            sent.num_stats += sent.is_accepted
            if sent.num_stats >= _STATS_UNTIL_COUNTED:
                self._uncharge(request_id)

    def on_sent(
        self, request_id: RequestId, uncached_tokens: int, now_s: float, *, is_timed: bool = True
    ) -> None:
        """A request is on its way to the group; `is_timed` is False when it waits for another group there,
        so that its first token shows nothing of this one's speed."""
        before = self._stats.waiting_tokens + self._view.charged_tokens
        sent = _Sent(uncached_tokens=uncached_tokens, tokens_before=before, sent_s=now_s, is_timed=is_timed)
        self._sent[request_id] = self._charged[request_id] = sent
        self._view.charged_tokens += uncached_tokens
        self._recent_requests = self._recent(now_s) + 1.0
        self._recent_s = now_s

    def on_accepted(self, request_id: RequestId) -> None:
        """The group has taken it."""
        if (sent := self._sent.get(request_id)) is not None:
            sent.is_accepted = True

    def on_token(self, request_id: RequestId, now_s: float) -> None:
        """Tokens of the request have come, or its prompt is computed when it asked for no more; the first
        time tells how fast the group computes prompts."""
        sent = self._sent.get(request_id)
        if sent is None or sent.has_token:
            return
        sent.has_token = True
        self._uncharge(request_id)
        tokens = sent.tokens_before + sent.uncached_tokens
        if sent.is_timed and tokens >= _MIN_OBSERVED_TOKENS and now_s > sent.sent_s:
            self._learn(tokens / (now_s - sent.sent_s))

    def hand_over(self, request_id: RequestId, taker: LoadTracker) -> None:
        """Another group has taken the request that was sent here; unknown ids are ignored."""
        self._uncharge(request_id)
        if (sent := self._sent.pop(request_id, None)) is not None:
            sent.is_timed = False  # what it was to wait for here says nothing of the other group
            taker._sent[request_id] = taker._charged[request_id] = sent
            taker._view.charged_tokens += sent.uncached_tokens

    def on_ended(self, request_id: RequestId) -> None:
        """The request is over, however it ended; unknown ids are ignored."""
        self._uncharge(request_id)
        self._sent.pop(request_id, None)

    def view(self, now_s: float, silent_s: float) -> GroupLoad:
        """The group as placement sees it now: one object, which is right until anything else is called."""
        view = self._view
        view.charged_requests = len(self._charged)
        view.own_requests = len(self._sent)
        view.recent_requests = self._recent(now_s)
        view.silent_s = silent_s
        return view

    def _uncharge(self, request_id: RequestId) -> None:
        if (sent := self._charged.pop(request_id, None)) is not None:
            self._view.charged_tokens -= sent.uncached_tokens

    def _learn(self, tokens_per_s: float) -> None:
        self._num_rates += 1
        mean = self._view.prefill_tokens_per_s or 0.0
        share = max(_LEARNING_RATE, 1.0 / self._num_rates)
        self._view.rate_trust = self._num_rates / (self._num_rates + _DOUBTED_RATES)
        self._view.prefill_tokens_per_s = max(mean + share * (tokens_per_s - mean), 1.0)

    def _recent(self, now_s: float) -> float:
        return self._recent_requests * exp2(-max(now_s - self._recent_s, 0.0) / _RECENT_HALF_LIFE_S)
