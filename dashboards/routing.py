"""The router: what it lets in, how it places requests, and what it costs itself."""

from __future__ import annotations

from dashboards.grafana import Dashboard, Query, Row
from dashboards.promql import (
    average,
    by_label,
    heatmap,
    highest,
    level,
    lines,
    mean,
    quantile,
    quantiles,
    rate,
    share,
    stat,
    total,
    total_rate,
)
from router.telemetry import table
from workers.metrics import group

_NOW = (
    stat("In flight", "Admitted requests that have not ended.", "short", total(level(table.INFLIGHT))),
    stat("Without a token", "Of those.", "short", total(level(table.QUEUED))),
    stat(
        "Tokens queued",
        "Prompt tokens of requests without a token.",
        "short",
        total(level(table.QUEUED_TOKENS)),
    ),
    stat(
        "Refused",
        "For want of room or groups: share of these and of what ended.",
        "percentunit",
        share(total_rate(table.REJECTED), f"{total_rate(table.REJECTED)} + {total_rate(table.REQUESTS)}"),
        thresholds=(0.01, 0.1),
    ),
    stat("Placing, p99", "From a tokenized prompt to its offer.", "s", quantile(0.99, table.ROUTE)),
    stat("Event loop, p99", "How late a timer runs.", "s", quantile(0.99, table.LOOP_LAG)),
    stat(
        "Known blocks",
        "Of all groups' caches; mean of the routers.",
        "short",
        average(level(table.INDEX_BLOCKS)),
    ),
    stat("Retries", "Offers to a further group, a second.", "ops", total_rate(table.RETRIES)),
)

_ADMISSION = (
    lines(
        "Requests by router",
        "In flight, and of those without a token.",
        "short",
        Query(total(level(table.INFLIGHT), "replica"), "{{replica}} in flight"),
        Query(total(level(table.QUEUED), "replica"), "{{replica}} without a token"),
    ),
    by_label(
        "Refused for want of room",
        "By what was full or not there, a second.",
        "reqps",
        total_rate(table.REJECTED, "reason"),
        "reason",
        is_stacked=True,
    ),
    by_label(
        "Clients that left",
        "Before their answer was complete: while it waited, or while it came; a second.",
        "reqps",
        total_rate(table.DISCONNECTS, "stage"),
        "stage",
        is_stacked=True,
    ),
)

_PLACEMENT = (
    by_label(
        "Why a group was best",
        "It reads blocks from another, has some of the prompt itself, is less busy; or the best had not "
        "taken the request. Requests a second.",
        "reqps",
        total_rate(table.DECISIONS, "reason"),
        "reason",
        is_stacked=True,
    ),
    quantiles(
        "Time to place a request", "From a tokenized prompt to its offer.", table.ROUTE, qs=(0.5, 0.99)
    ),
    lines(
        "Cached prompt tokens: taken to be, and were",
        "A second. What placement expected at the group it chose, and what engines found in their own cache. "
        "Apart: the index is behind.",
        "short",
        Query(total_rate(table.PREDICTED_TOKENS), "expected"),
        Query(total(rate(group.PROMPT_TOKENS, 'source="cached"', 'role!="prefill"')), "found"),
    ),
    lines(
        "Spread of load",
        "Requests in the fullest engine of a pool over the pool's mean: 1 is even.",
        "short",
        Query(
            share(highest(level(group.RUNNING), "role"), average(level(group.RUNNING), "role")), "{{role}}"
        ),
    ),
    by_label(
        "Retries",
        "Offers to a further group, by what became of the one before; a second.",
        "ops",
        total_rate(table.RETRIES, "reason"),
        "reason",
        is_stacked=True,
    ),
    by_label(
        "Requests whose group ended",
        "By what became of them, a second.",
        "ops",
        total_rate(table.MIGRATIONS, "result"),
        "result",
        is_stacked=True,
    ),
    by_label(
        "Sources that failed",
        "By who was to give blocks instead, a second.",
        "ops",
        total_rate(table.KV_REDIRECTS, "source"),
        "source",
        is_stacked=True,
    ),
)

_INDEX = (
    by_label(
        "Known blocks",
        "Cached blocks of all groups that a router knows of.",
        "short",
        total(level(table.INDEX_BLOCKS), "replica"),
        "replica",
    ),
    by_label(
        "Entries read", "Of block logs, a second.", "ops", total_rate(table.INDEX_EVENTS, "kind"), "kind"
    ),
    by_label(
        "Gaps",
        "Times that entries of a block log were missing, a second; the log is read anew then.",
        "ops",
        total_rate(table.INDEX_GAPS, "replica"),
        "replica",
    ),
)

_ITSELF = (
    by_label(
        "Mean of a stage",
        "Parts of the time to the first token; render, tokenize, route and detokenize are the router's own, "
        "serve is what nobody else accounts for.",
        "s",
        mean(table.STAGE, "stage"),
        "stage",
    ),
    lines(
        "Slow requests, by stage",
        "p99 of a stage.",
        "s",
        Query(quantile(0.99, table.STAGE, "stage"), "{{stage}}"),
    ),
    heatmap("Event loop", "How late a timer runs; timers a second.", "s", table.LOOP_LAG),
    quantiles("Time to a token, mean of a choice", "Of choices that ended.", table.TPOT),
    by_label(
        "Age of counts",
        "How old each router replica's counts are in this answer. One that grows has ended; its series leave "
        "after ten minutes. Told by the plain /metrics; always 0 through Ray.",
        "s",
        highest(level(table.TELEMETRY_AGE), "replica"),
        "replica",
    ),
    lines(
        "Counts not exchanged",
        "Times a replica could not exchange its counts with the others, a second.",
        "ops",
        Query(total_rate(table.TELEMETRY_FAILURES), "failures"),
    ),
)

ROUTING = Dashboard(
    uid="tandem-router",
    title="Tandem / Router",
    description="What the router lets in, how it places requests, and what it costs itself.",
    models=table.REQUESTS.shown_name,
    groups=group.UP.shown_name,
    rows=(
        Row("Now", 4, _NOW),
        Row("Admission", 8, _ADMISSION),
        Row("Placement", 8, _PLACEMENT),
        Row("What placement knows", 8, _INDEX),
        Row("The router itself", 8, _ITSELF),
    ),
)
