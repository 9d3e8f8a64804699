"""The figures of a run, as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from cluster.figures.percentile import percentile
from cluster.simulate.run import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Seconds: mean and percentiles."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One line of a comparison."""

    cluster: str  # its groups
    policy: str
    requests: int
    refused: int
    ttft_s: Spread  # from arrival to the first token
    tpot_s: Spread  # between tokens after the first, mean of a request
    span_s: float  # until the last token
    nearly_all_s: float  # until 99 of 100 answers had ended; the slowest answer alone decides the span
    tokens_per_s: float  # new ones of those, over that time
    prompt_tokens: int
    hit_tokens: int  # of the prompts, found in a cache
    hit_share: float
    pulled_tokens: int  # read from another group
    busy_share: float  # of the span, mean over groups
    busy_max_over_mean: float  # the busiest group
    requests_max_over_mean: float  # the group with most requests
    preemptions: int
    steps: int
    events: int
    router_us: Spread  # CPU microseconds of a placement
    wall_s: float  # real time of the run
    cpu_s: float  # of the process in it
    peak_mib: int  # resident memory of the process so far


def spread(values: Sequence[float]) -> Spread:
    """Of some values; zeros for none."""
    if not values:
        return Spread(mean=0.0, p50=0.0, p90=0.0, p99=0.0)
    p50, p90, p99 = (percentile(values, percent) for percent in (50, 90, 99))
    return Spread(mean=fmean(values), p50=p50, p90=p90, p99=p99)


def report(cluster: str, outcome: Outcome) -> Report:
    """What came of a run."""
    answered = [served for served in outcome.served if served.refusal is None]
    ttft_s, tpot_s = [], []
    nearly_all_s = percentile([served.end_s or 0.0 for served in answered], 99) if answered else 0.0
    in_time = [served.num_tokens for served in answered if (served.end_s or 0.0) <= nearly_all_s]
    for served in answered:
        assert served.first_s is not None and served.end_s is not None
        ttft_s.append(served.first_s - served.arrival_s)
        if served.num_tokens > 1:
            tpot_s.append((served.end_s - served.first_s) / (served.num_tokens - 1))
    prompt_tokens = sum(served.request.prompt_tokens for served in answered)
    span_s = outcome.span_s or 1.0
    return Report(
        cluster=cluster,
        policy=outcome.policy,
        requests=len(answered),
        refused=len(outcome.served) - len(answered),
        ttft_s=spread(ttft_s),
        tpot_s=spread(tpot_s),
        span_s=outcome.span_s,
        nearly_all_s=nearly_all_s,
        tokens_per_s=sum(in_time) / nearly_all_s if nearly_all_s else 0.0,
        prompt_tokens=prompt_tokens,
        hit_tokens=outcome.hit_tokens,
        hit_share=outcome.hit_tokens / prompt_tokens if prompt_tokens else 0.0,
        pulled_tokens=outcome.pulled_tokens,
        busy_share=fmean(outcome.busy_s) / span_s,
        busy_max_over_mean=_max_over_mean(outcome.busy_s),
        requests_max_over_mean=_max_over_mean(outcome.num_requests),
        preemptions=outcome.num_preemptions,
        steps=outcome.num_steps,
        events=outcome.num_events,
        router_us=spread([1e6 * seconds for seconds in outcome.decision_s]),
        wall_s=outcome.wall_s,
        cpu_s=outcome.cpu_s,
        peak_mib=outcome.peak_bytes >> 20,
    )


def _max_over_mean(values: Sequence[float]) -> float:
    mean = fmean(values)
    return max(values) / mean if mean else 0.0
