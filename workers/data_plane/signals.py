"""What a group says of its last seconds to whoever decides how many groups there are.

Serve asks each front about once a second (`record_autoscaling_stats`) for a mapping of numbers; this module
makes it from the group's stats, and reads it again. Rates are over the last WINDOW_S seconds, also when a
group is younger: what goes to it now has gone to others before, and the sum over groups is to stay right.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields

from workers.types import GroupStats

WINDOW_S = 10.0
_MIN_STEPS = 8  # fewer say nothing of how long steps are


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSignals:
    """The numbers. All 0 for a group without work."""

    queue_tokens: float = 0.0  # prompt tokens not computed yet
    waiting: float = 0.0  # sequences
    running: float = 0.0
    context_tokens: float = 0.0  # of the running ones
    kv_use: float = 0.0  # share of its blocks that requests hold, 0 to 1
    arriving_tokens_per_s: float = 0.0  # of prompts, without what was cached
    step_s: float = 0.0  # mean length of a step: what a sequence waits for its next token; 0: hardly any
    step_prompt_tokens: float = 0.0  # mean of a step
    step_rows: float = 0.0  # likewise, sequences that got a token
    ttft_s: float = 0.0  # mean over the answers that began, from acceptance to the first token; 0: none began

    @classmethod
    def of(cls, numbers: Mapping[str, float]) -> GroupSignals:
        """From a mapping that has more; what is missing is 0."""
        return cls(**{entry.name: float(numbers.get(entry.name, 0.0)) for entry in fields(cls)})


class SignalWindow:
    """The last stats of one group, and what they say together."""

    def __init__(self, clock: Callable[[], float], extra: Mapping[str, float]) -> None:
        """`extra`: numbers of the deployment that go with every answer."""
        self._clock = clock
        self._extra = dict(extra)
        self._seen: deque[tuple[float, GroupStats]] = deque()

    def numbers(self, stats: GroupStats) -> dict[str, float]:
        """What to tell now."""
        now_s = self._clock()
        self._seen.append((now_s, stats))
        while len(self._seen) > 2 and self._seen[1][0] <= now_s - WINDOW_S:
            self._seen.popleft()
        then_s, then = self._seen[0]
        return {**asdict(signals(then, stats, now_s - then_s)), **self._extra}


def signals(then: GroupStats, now: GroupStats, seconds: float) -> GroupSignals:
    """What two stats of one group, `seconds` apart, say together."""
    elapsed_s = max(seconds, WINDOW_S)
    computed = (now.prompt_tokens_total - now.cached_tokens_total) - (
        then.prompt_tokens_total - then.cached_tokens_total
    )
    num_first = now.first_tokens_total - then.first_tokens_total
    num_steps = max(now.num_steps - then.num_steps, 1)
    step_s = now.step_seconds_total - then.step_seconds_total
    blocks = now.free_blocks + now.cached_blocks + now.active_blocks
    return GroupSignals(
        queue_tokens=now.waiting_tokens,
        waiting=now.num_waiting,
        running=now.num_running,
        context_tokens=now.running_tokens,
        kv_use=now.active_blocks / blocks if blocks else 0.0,
        arriving_tokens_per_s=max(computed + now.waiting_tokens - then.waiting_tokens, 0) / elapsed_s,
        step_s=step_s / num_steps if num_steps >= _MIN_STEPS else 0.0,
        step_prompt_tokens=computed / num_steps,
        step_rows=(now.generated_tokens_total - then.generated_tokens_total) / num_steps,
        ttft_s=(now.first_token_seconds_total - then.first_token_seconds_total) / num_first
        if num_first
        else 0.0,
    )
