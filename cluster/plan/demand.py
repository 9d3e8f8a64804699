"""What is asked of a service: requests a second of given lengths, and how soon they are to be answered."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cluster.figures.traces import TraceRequest
from cluster.figures.words import counted

_WINDOW_S = 60.0
_MOST_SAMPLES = 2000  # lengths of a longer trace are thinned to about so many


_MOST_REFUSED = 0.5  # of the requests; beyond that a deployment would not serve what was asked for


class TooLong(ValueError):
    """Most requests are longer than the planned context. The text says what context would hold them."""


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
    refused_share: float = 0.0  # of the requests that were asked for; rate and lengths are without them

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

    def within(self, context: int) -> Demand:
        """Without the requests that are longer than a context of so many tokens, which a service refuses.
        Raises TooLong when most are."""
        kept = [(prompt, output) for prompt, output in self.lengths if prompt + output <= context]
        refused = 1 - len(kept) / len(self.lengths)
        if refused > _MOST_REFUSED:
            longest = max(prompt + output for prompt, output in self.lengths)
            raise TooLong(
                f"{refused:.1%} of the requests are longer than --context {context:,} and would be refused: "
                f"--context {longest} holds all of them"
            )
        return replace(self, rate=self.rate * (1 - refused), lengths=kept, refused_share=refused)


def of_trace(requests: Sequence[TraceRequest], name: str) -> Demand:
    """At the rate of the trace's busiest minute: a service is built for it, not for the mean."""
    minutes = Counter(int(request.arrival_s // _WINDOW_S) for request in requests)
    span = requests[-1].arrival_s - requests[0].arrival_s
    rate = max(minutes.values()) / _WINDOW_S if span >= _WINDOW_S else len(requests) / max(span, 1.0)
    thin = -(-len(requests) // _MOST_SAMPLES)
    lengths = [(request.prompt_tokens, request.output_tokens) for request in requests[::thin]]
    source = f"{name}: {counted(len(requests), 'request')}, its busiest minute"
    return Demand(rate=rate, lengths=lengths, source=source)
