"""What the KV cache is for: one sequence generated with it, and with everything computed anew for each token.

Without the cache token t costs a pass over the prompt and all t - 1 tokens before it, so that t tokens take
O(t^2) passes over tokens; with it each costs one row.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from cluster.bench.engine import BenchEngine
from cluster.bench.orders import KvCacheOrder
from cluster.bench.report import Report
from cluster.bench.subject import Prompts, open_engine

_REPORT_S = 2.0


def compare_kv_cache(order: KvCacheOrder, report: Callable[[str], None]) -> dict[str, Any]:
    """A finished report: a row for each doubling of the output length."""
    if order.new_tokens < 2:
        raise ValueError(f"{order.new_tokens} new tokens show no growth: take at least 2")
    report(f"loading {order.engine.model}")
    with open_engine(order.engine) as engine:
        facts = engine.facts
        (prompt,) = Prompts(facts.limits.vocab_size).take(1, order.prompt_tokens)
        engine.run([prompt], 4)  # memory and code are touched once, untimed
        report("with the cache")
        before = _with_cache(engine, prompt, order.new_tokens)
        without = _without_cache(engine, prompt, order.new_tokens, report)
        # Before and after the long part, so that a moment in which the machine is disturbed does not decide.
        with_cache = min(before, _with_cache(engine, prompt, order.new_tokens), key=lambda run: run[-1])
        rows = [
            {
                "new_tokens": tokens,
                "with_cache_s": round(with_cache[tokens - 1], 4),
                "without_cache_s": round(without[tokens - 1], 4),
                "times_slower": round(without[tokens - 1] / with_cache[tokens - 1], 2),
                "passes_with": order.prompt_tokens + tokens - 1,
                "passes_without": _passes(order.prompt_tokens, tokens),
            }
            for tokens in _doublings(order.new_tokens)
        ]
        return Report(
            kind="kv-cache",
            rows=rows,
            config={"model": order.engine.model, "dtype": facts.dtype, "device": facts.device},
            load={
                "prompt_tokens": order.prompt_tokens,
                "new_tokens": order.new_tokens,
                "growth_with": round(growth(with_cache), 2),
                "growth_without": round(growth(without), 2),
            },
            samples={"with_cache_s": with_cache, "without_cache_s": without},
            ceilings={},
        ).content()


def growth(cumulative_s: Sequence[float]) -> float:
    """Exponent with which the time of the second half of the output grows: 1 linear, 2 quadratic.

    Of the time since the first token, so that the prompt does not hide the growth.
    """
    last = len(cumulative_s) - 1
    half = last // 2
    if half < 1:
        return 1.0
    first = cumulative_s[0]
    return math.log((cumulative_s[last] - first) / (cumulative_s[half] - first)) / math.log(last / half)


def _with_cache(engine: BenchEngine, prompt: Sequence[int], new_tokens: int) -> list[float]:
    """Cumulative seconds until each token. A long prompt takes several steps before the first."""
    steps = engine.run([prompt], new_tokens).steps
    return list(accumulate(step.seconds for step in steps))[-new_tokens:]


def _without_cache(
    engine: BenchEngine, prompt: Sequence[int], new_tokens: int, report: Callable[[str], None]
) -> list[float]:
    """Cumulative seconds until each token, every one from a prompt that is computed whole."""
    cumulative: list[float] = []
    known = list(prompt)
    total, said = 0.0, time.monotonic()
    for number in range(new_tokens):
        run = engine.run([known], 1)
        total += run.seconds
        cumulative.append(total)
        known.append(known[number % len(prompt)])  # which token it is does not matter for the time
        if time.monotonic() - said > _REPORT_S:
            report(f"without the cache: {number + 1} of {new_tokens} tokens")
            said = time.monotonic()
    return cumulative


def _passes(prompt: int, tokens: int) -> int:
    """Passes over tokens without a cache: prompt, prompt + 1, ... prompt + tokens - 1."""
    return tokens * prompt + tokens * (tokens - 1) // 2


def _doublings(most: int) -> list[int]:
    found = [2**power for power in range(3, most.bit_length()) if 2**power < most]
    return [*found, most]
