"""The fleet: what clients get, whether it is enough, and on what machines it runs."""

from __future__ import annotations

from dashboards import ray_series
from dashboards.grafana import Dashboard, Query, Row
from dashboards.promql import (
    by_label,
    heatmap,
    highest,
    level,
    lines,
    quantile,
    quantiles,
    rate,
    share,
    stat,
    total,
    total_increase,
    total_rate,
)
from router.telemetry import table
from workers.metrics import group

_FAILED = total_rate(table.SERVER_ERRORS)
_ENDED = total_rate(table.REQUESTS)
USED_BLOCKS = total(level(group.KV_BLOCKS, 'state=~"active|transferring"'))
ALL_BLOCKS = total(level(group.KV_BLOCKS))


def _missed(window: str) -> str:
    """Share of ended requests that were not good: failed, or too slow for the limits of goodput."""
    good, ended = total_increase(table.GOODPUT, window), total_increase(table.REQUESTS, window)
    return f"1 - {share(good, ended)}"


_NOW = (
    stat(
        "Groups that answer",
        "Worker groups from which a token has come in their present start.",
        "short",
        total(level(group.UP)),
    ),
    stat("Requests", "Admitted requests that ended, a second.", "reqps", _ENDED),
    stat("Output", "Tokens delivered, a second.", "short", total_rate(table.GENERATION_TOKENS)),
    stat(
        "Failures",
        "5xx answers, as a share of these and of what was admitted.",
        "percentunit",
        share(_FAILED, f"{_FAILED} + {_ENDED}"),
        thresholds=(0.01, 0.05),
    ),
    stat(
        "First token, p95",
        "From a request's arrival to its first token, with the time it waited.",
        "s",
        quantile(0.95, table.TTFT),
    ),
    stat("Next token, p95", "Gap between tokens of a choice.", "s", quantile(0.95, table.ITL)),
    stat(
        "Goodput",
        "Share of ended requests within the limits router.http.goodput_*; nothing where none is set.",
        "percentunit",
        share(total_rate(table.GOODPUT), _ENDED),
    ),
    stat(
        "KV blocks in use",
        "Held by requests or being filled from another group; cached ones can be given up.",
        "percentunit",
        share(USED_BLOCKS, ALL_BLOCKS),
        thresholds=(0.8, 0.95),
    ),
)

_REQUESTS = (
    by_label(
        "Requests by reason",
        "How admitted requests ended, a second.",
        "reqps",
        total_rate(table.REQUESTS, "reason"),
        "reason",
        is_stacked=True,
    ),
    lines(
        "Errors by code",
        "Answers that refuse (4xx) or fail (5xx), a second.",
        "reqps",
        Query(total_rate(table.CLIENT_ERRORS, "code"), "4xx {{code}}"),
        Query(total_rate(table.SERVER_ERRORS, "code"), "5xx {{code}}"),
    ),
    by_label(
        "Refused for want of room",
        "By what was full or not there, a second.",
        "reqps",
        total_rate(table.REJECTED, "reason"),
        "reason",
        is_stacked=True,
    ),
    lines(
        "Requests under way",
        "Admitted and not ended; of those, without a token yet.",
        "short",
        Query(total(level(table.INFLIGHT)), "in flight"),
        Query(total(level(table.QUEUED)), "without a token"),
    ),
    lines(
        "Longest wait for a first token",
        "How long the oldest request without a token has been waiting.",
        "s",
        Query(highest(level(table.OLDEST)), "oldest"),
    ),
    lines(
        "Limits missed",
        "Share of ended requests that failed or were slower than router.http.goodput_*. An objective of 99 % "
        "is spent as fast as allowed at 1 %.",
        "percentunit",
        Query(_missed("5m"), "5 minutes"),
        Query(_missed("1h"), "1 hour"),
    ),
)

_TIMES = (
    quantiles("Time to first token", "With the time a request waited.", table.TTFT),
    quantiles("Time between tokens", "Gaps between tokens of a choice, at the router.", table.ITL),
    quantiles("Whole request", "From arrival to end.", table.E2E),
)

_TOKENS = (
    lines(
        "Tokens",
        "Prompt tokens admitted, those of them found in a cache, and tokens delivered, a second.",
        "short",
        Query(total_rate(table.PROMPT_TOKENS), "prompt"),
        Query(total_rate(table.CACHED_TOKENS), "prompt, cached"),
        Query(total_rate(table.GENERATION_TOKENS), "output"),
    ),
    lines(
        "Tokens in the last hour and day",
        "For each model, prompt and output.",
        "short",
        Query(total_increase(table.PROMPT_TOKENS, "1h", "model"), "{{model}} prompt 1 h"),
        Query(total_increase(table.GENERATION_TOKENS, "1h", "model"), "{{model}} output 1 h"),
        Query(total_increase(table.PROMPT_TOKENS, "1d", "model"), "{{model}} prompt 24 h"),
        Query(total_increase(table.GENERATION_TOKENS, "1d", "model"), "{{model}} output 24 h"),
    ),
    heatmap("Prompt length", "Requests a second by prompt tokens.", "short", table.PROMPT_LENGTH),
)

_GROUPS = (
    by_label(
        "Groups up",
        "1: a token has come from the group in its present start.",
        "short",
        highest(level(group.UP), "group"),
        "group",
    ),
    by_label(
        "Starts of a group's ranks",
        "One that rises is restarting.",
        "short",
        highest(level(group.EPOCH), "group"),
        "group",
    ),
    by_label(
        "Output of groups",
        "Tokens sampled, a second.",
        "short",
        total_rate(group.GENERATED_TOKENS, "group"),
        "group",
        is_stacked=True,
    ),
    by_label(
        "KV blocks in use",
        "Share of each group's pool.",
        "percentunit",
        share(
            total(level(group.KV_BLOCKS, 'state=~"active|transferring"'), "group"),
            total(level(group.KV_BLOCKS), "group"),
        ),
        "group",
    ),
    by_label(
        "Versions",
        "Router replicas by what they run; two while an update runs.",
        "short",
        total(level(table.BUILD), "version"),
        "version",
        is_stacked=True,
    ),
    lines(
        "Do the counts agree?",
        "Tokens a second that routers delivered and that engines sampled. Engines count somewhat more: "
        "tokens of requests whose client has left.",
        "short",
        Query(total_rate(table.GENERATION_TOKENS), "delivered"),
        Query(total(rate(group.GENERATED_TOKENS, 'role!="prefill"')), "sampled"),
    ),
)

_MACHINES = (
    lines(
        "Replicas",
        "Healthy replicas of Ray Serve's deployments.",
        "short",
        Query(f"sum by (application, deployment) ({ray_series.REPLICAS})", "{{application}} {{deployment}}"),
    ),
    lines(
        "CPU",
        "Use of each node.",
        "percent",
        Query(f"avg by (instance) ({ray_series.NODE_CPU})", "{{instance}}"),
    ),
    lines(
        "Memory",
        "Share in use on each node.",
        "percentunit",
        Query(
            f"max by (instance) ({ray_series.NODE_MEMORY})"
            f" / max by (instance) ({ray_series.NODE_MEMORY_TOTAL})",
            "{{instance}}",
        ),
    ),
)

_GPUS = (
    lines(
        "GPU use",
        "As the driver says.",
        "percent",
        Query(f"max by (instance, GpuIndex) ({ray_series.GPU_USE})", "{{instance}} {{GpuIndex}}"),
    ),
    lines(
        "GPU memory",
        "In use.",
        "bytes",
        Query(
            f"max by (instance, GpuIndex) ({ray_series.GPU_MEMORY}) * 1048576", "{{instance}} {{GpuIndex}}"
        ),
    ),
    lines(
        "GPU power",
        "Drawn now.",
        "watt",
        Query(f"max by (instance, GpuIndex) ({ray_series.GPU_POWER}) / 1000", "{{instance}} {{GpuIndex}}"),
    ),
)

FLEET = Dashboard(
    uid="tandem-fleet",
    title="Tandem / Fleet",
    description="What clients get, whether it is enough, and on what machines it runs.",
    models=table.REQUESTS.shown_name,
    groups=group.UP.shown_name,
    rows=(
        Row("Now", 4, _NOW),
        Row("Requests", 8, _REQUESTS),
        Row("Times", 8, _TIMES),
        Row("Tokens", 8, _TOKENS),
        Row("Worker groups", 8, _GROUPS),
        Row("Machines (Ray's own series)", 8, _MACHINES),
        Row("GPUs (Ray's own series)", 8, _GPUS),
    ),
)
