"""What a load test says of its requests. Plain numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cluster.figures.percentile import percentile


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a request must keep to count as good; None: nothing is asked of it."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One request. Times are seconds after the start of the run."""

    number: int
    due_s: float  # when it should be sent: latencies count from here, however late it was sent
    sent_s: float
    token_s: tuple[float, ...] = ()  # when each piece of the answer came
    end_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0  # as the server counted
    cached_tokens: int = 0
    error: str = ""  # why it failed; empty for an answer that came whole

    @property
    def is_answered(self) -> bool:
        return not self.error and bool(self.token_s)

    @property
    def ttft_ms(self) -> float:
        return (self.token_s[0] - self.due_s) * 1e3

    @property
    def latency_ms(self) -> float:
        return (self.end_s - self.due_s) * 1e3

    @property
    def tpot_ms(self) -> float | None:
        """None for an answer of one token."""
        if self.output_tokens < 2:
            return None
        return (self.token_s[-1] - self.token_s[0]) * 1e3 / (self.output_tokens - 1)

    def is_good(self, limits: Limits) -> bool:
        """Whether it was answered within the limits."""
        if not self.is_answered or (limits.ttft_ms is not None and self.ttft_ms > limits.ttft_ms):
            return False
        tpot = self.tpot_ms
        return limits.tpot_ms is None or tpot is None or tpot <= limits.tpot_ms


def summary(outcomes: Sequence[Outcome], limits: Limits) -> dict[str, Any]:
    """One row. Rates are over the time from the first due request to the end of the last answer."""
    answered = [outcome for outcome in outcomes if outcome.is_answered]
    start = min(outcome.due_s for outcome in outcomes)
    span = max(max(outcome.end_s for outcome in outcomes) - start, 1e-9)
    offered = max(outcome.due_s for outcome in outcomes) - start
    gaps = [
        (later - earlier) * 1e3
        for outcome in answered
        for earlier, later in zip(outcome.token_s, outcome.token_s[1:], strict=False)
    ]
    prompts = sum(outcome.prompt_tokens for outcome in answered)
    return {
        "requests": len(outcomes),
        "answered": len(answered),
        "failed": len(outcomes) - len(answered),
        "offered_per_s": round(len(outcomes) / offered, 3) if offered > 0 else None,
        "answered_per_s": round(len(answered) / span, 3),
        "good_per_s": round(sum(outcome.is_good(limits) for outcome in outcomes) / span, 3),
        "good_share": round(sum(outcome.is_good(limits) for outcome in outcomes) / len(outcomes), 4),
        "prompt_tokens_per_s": round(prompts / span, 1),
        "output_tokens_per_s": round(sum(outcome.output_tokens for outcome in answered) / span, 1),
        "cached_share": round(sum(outcome.cached_tokens for outcome in answered) / prompts, 4)
        if prompts
        else 0,
        "ttft_ms": _spread([outcome.ttft_ms for outcome in answered]),
        "tpot_ms": _spread([found for outcome in answered if (found := outcome.tpot_ms) is not None]),
        "itl_ms": _spread(gaps),
        "latency_ms": _spread([outcome.latency_ms for outcome in answered]),
        # Of our own: how late requests were sent. Beyond a few milliseconds the client was too slow.
        "send_delay_ms": _spread([(outcome.sent_s - outcome.due_s) * 1e3 for outcome in outcomes]),
    }


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    """Mean and percentiles; None without any value."""
    if not values:
        return None
    found = {"mean": sum(values) / len(values)}
    found |= {f"p{percent}": percentile(values, percent) for percent in (50, 90, 99)}
    return {name: round(value, 2) for name, value in {**found, "max": max(values)}.items()}
