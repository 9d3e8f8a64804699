"""Prompts that wait for a group: an M/G/1 queue."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from cluster.figures.percentile import percentile
from cluster.figures.step_cost import StepCost
from cluster.plan.demand import Demand


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillQueue:
    """Moments of the time that prompts take, and of the steps they take."""

    mean_s: float
    mean_square_s2: float
    p90_s: float
    mean_steps: float
    mean_square_steps: float
    mean_seconds_steps: float  # of the product of both
    p90_steps: float

    @classmethod
    def of(cls, demand: Demand, cost: StepCost, *, step_tokens: int) -> PrefillQueue:
        """Of prompts that have the steps to themselves."""
        times = [cost.prefill_seconds(prompt, step_tokens=step_tokens) for prompt, _ in demand.lengths]
        steps = [prompt / step_tokens for prompt, _ in demand.lengths]  # prompts share steps
        return cls(
            mean_s=statistics.mean(times),
            mean_square_s2=statistics.mean(time * time for time in times),
            p90_s=percentile(times, 90),
            mean_steps=statistics.mean(steps),
            mean_square_steps=statistics.mean(count * count for count in steps),
            mean_seconds_steps=statistics.mean(
                time * count for time, count in zip(times, steps, strict=True)
            ),
            p90_steps=percentile(steps, 90),
        )

    def slowed(self, extra_s: float) -> PrefillQueue:
        """The same prompts when each of their steps takes so much longer."""
        return PrefillQueue(
            mean_s=self.mean_s + extra_s * self.mean_steps,
            mean_square_s2=self.mean_square_s2
            + 2 * extra_s * self.mean_seconds_steps
            + extra_s**2 * self.mean_square_steps,
            p90_s=self.p90_s + extra_s * self.p90_steps,
            mean_steps=self.mean_steps,
            mean_square_steps=self.mean_square_steps,
            mean_seconds_steps=self.mean_seconds_steps + extra_s * self.mean_square_steps,
            p90_steps=self.p90_steps,
        )

    def busy(self, rate: float) -> float:
        """Share of the time in which a group computes prompts; 1 and more is too much."""
        return rate * self.mean_s

    def ttft_p90_s(self, rate: float) -> float:
        """Wait and service of 90 % of the requests; inf when more comes than is served.

        Mean wait by Pollaczek and Khinchine; its distribution taken as in M/M/1, where the wait of those that
        wait is exponential: P(W > t) = u exp(-u t / E[W]) at utilisation u.
        """
        used = self.busy(rate)
        if used >= 1:
            return math.inf
        mean_wait = rate * self.mean_square_s2 / (2 * (1 - used))
        wait = mean_wait / used * math.log(10 * used) if used > 0.1 else 0.0
        return wait + self.p90_s
