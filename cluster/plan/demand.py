"""What is asked of a service: requests a second of given lengths, and how soon they are to be answered."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.figures.traces import TraceRequest

_WINDOW_S = 60.0
_MOST_SAMPLES = 2000  # lengths of a longer trace are thinned to about so many


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """For 90 % of the requests."""

    ttft_s: float
    tpot_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Poisson arrivals at `rate` with lengths drawn from `lengths`."""

    rate: float  # requests a second
    lengths: Sequence[tuple[int, int]]  # prompt and output tokens
    source: str

    @property
    def mean_prompt(self) -> float:
        return statistics.mean(prompt for prompt, _ in self.lengths)

    @property
    def mean_output(self) -> float:
        return statistics.mean(output for _, output in self.lengths)

    @property
    def mean_context(self) -> float:
        """Of a request while it decodes, over time: long answers are there for longer."""
        steps = sum(output for _, output in self.lengths)
        return sum(output * (prompt + output / 2) for prompt, output in self.lengths) / steps

    def share_above(self, tokens: int) -> float:
        """Of the requests, those that are longer than so many tokens."""
        return sum(prompt + output > tokens for prompt, output in self.lengths) / len(self.lengths)


def of_trace(requests: Sequence[TraceRequest], name: str) -> Demand:
    """At the rate of the trace's busiest minute: a service is built for it, not for the mean."""
    minutes = Counter(int(request.arrival_s // _WINDOW_S) for request in requests)
    span = requests[-1].arrival_s - requests[0].arrival_s
    rate = max(minutes.values()) / _WINDOW_S if span >= _WINDOW_S else len(requests) / max(span, 1.0)
    thin = -(-len(requests) // _MOST_SAMPLES)
    lengths = [(request.prompt_tokens, request.output_tokens) for request in requests[::thin]]
    return Demand(rate=rate, lengths=lengths, source=f"{name}: {len(requests)} requests, its busiest minute")
