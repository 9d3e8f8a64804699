"""Worker groups from inside: load, steps, what holds them up, and where the first token's time goes."""

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
    stat,
    sum_rate,
    total,
    total_rate,
)
from router.telemetry import table
from workers.metrics import group

_NOW = (
    stat("Running", "Requests with blocks.", "short", total(level(group.RUNNING))),
    stat("Waiting", "Requests in the engines' queues.", "short", total(level(group.WAITING))),
    stat(
        "To compute",
        "Prompt tokens of running and waiting requests.",
        "short",
        total(level(group.WAITING_TOKENS)),
    ),
    stat("Sampled", "Tokens a second.", "short", total_rate(group.GENERATED_TOKENS)),
    stat("Steps", "A second.", "ops", total_rate(group.STEPS)),
    stat(
        "Busy",
        "Share of the last seconds that was spent in steps; mean of the groups.",
        "percentunit",
        average(level(group.BUSY)),
    ),
    stat(
        "Preemptions",
        "Sequences put back for want of blocks, a second.",
        "ops",
        total_rate(group.PREEMPTIONS),
    ),
    stat("Context", "Tokens of running requests.", "short", total(level(group.CONTEXT_TOKENS))),
)

_LOAD = (
    lines(
        "Requests",
        "In the engine with blocks, and in its queue.",
        "short",
        Query(total(level(group.RUNNING), "group"), "{{group}} running"),
        Query(total(level(group.WAITING), "group"), "{{group}} waiting"),
    ),
    by_label(
        "Prompt tokens to compute",
        "Of running and waiting requests: what placement calls load.",
        "short",
        total(level(group.WAITING_TOKENS), "group"),
        "group",
    ),
    by_label(
        "How requests ended",
        "As the engines say, a second.",
        "reqps",
        total_rate(group.FINISHED, "reason"),
        "reason",
        is_stacked=True,
    ),
    by_label(
        "Where prompt tokens came from",
        "Computed, cached in the group, or read from another group; a second.",
        "short",
        total_rate(group.PROMPT_TOKENS, "source"),
        "source",
        is_stacked=True,
    ),
    by_label(
        "Tokens sampled",
        "A second.",
        "short",
        total_rate(group.GENERATED_TOKENS, "group"),
        "group",
        is_stacked=True,
    ),
    by_label(
        "Guessed tokens",
        "Checked by the model, a second: accepted ones are sampled tokens that cost no step of their own.",
        "short",
        total_rate(group.DRAFT_TOKENS, "guess"),
        "guess",
        is_stacked=True,
    ),
    lines(
        "Guesses that fail",
        "Steps that went without because making guesses failed, a second; 1 where no more are made.",
        "short",
        Query(total_rate(group.GUESS_FAILURES, "group"), "{{group}} failed"),
        Query(total(level(group.GUESSES_OFF), "group"), "{{group}} off"),
    ),
    by_label(
        "Preemptions",
        "Sequences put back for want of blocks, a second.",
        "ops",
        total_rate(group.PREEMPTIONS, "group"),
        "group",
    ),
)

_STEPS = (
    lines(
        "Step time by kind",
        "Prefill: prompt tokens only. Decode: a next token for each sequence. Mixed: both.",
        "s",
        Query(quantile(0.5, group.STEP_SECONDS, "kind"), "{{kind}} p50"),
        Query(quantile(0.99, group.STEP_SECONDS, "kind"), "{{kind}} p99"),
    ),
    heatmap("Tokens of a step", "Steps a second by tokens computed.", "short", group.STEP_TOKENS_COMPUTED),
    by_label(
        "Where the time goes",
        "Seconds a second in steps of a kind, over all groups.",
        "short",
        sum_rate(group.STEP_SECONDS, "kind"),
        "kind",
        is_stacked=True,
    ),
    by_label(
        "Tokens of a step, mean",
        "Batch size of decode steps; chunk of prefill steps.",
        "short",
        mean(group.STEP_TOKENS_COMPUTED, "kind"),
        "kind",
    ),
    by_label(
        "Step time, moving mean",
        "What placement reckons with.",
        "s",
        highest(level(group.STEP_MEAN), "group"),
        "group",
    ),
    by_label("Steps", "A second.", "ops", total_rate(group.STEPS, "group"), "group"),
)

_LIMITS = (
    by_label(
        "Held up by",
        "Groups by what holds recent steps up: arithmetic, reading memory, neither (overhead), or no work.",
        "short",
        total(level(group.BOTTLENECK), "bound"),
        "bound",
        is_stacked=True,
    ),
    lines(
        "Nearness to the ceilings",
        "Of recent steps: arithmetic and memory reads over what the machines can do, as measured at start.",
        "percentunit",
        Query(average(level(group.COMPUTE_USE), "group"), "{{group}} compute"),
        Query(average(level(group.BANDWIDTH_USE), "group"), "{{group}} bandwidth"),
    ),
    by_label("Busy", "Share of time in steps.", "percentunit", average(level(group.BUSY), "group"), "group"),
    lines(
        "Arithmetic",
        "Floating-point operations a second of all groups, and their ceilings together.",
        "short",
        Query(total_rate(group.FLOP), "achieved"),
        Query(total(level(group.FLOP_CEILING)), "ceiling"),
    ),
    lines(
        "Memory reads",
        "Weights and KV blocks read a second by all groups, and their ceilings together.",
        "Bps",
        Query(total_rate(group.READ_BYTES), "achieved"),
        Query(total(level(group.READ_CEILING)), "ceiling"),
    ),
    lines(
        "Context of running requests",
        "Tokens: what a decode step reads KV blocks of.",
        "short",
        Query(total(level(group.CONTEXT_TOKENS), "group"), "{{group}}"),
    ),
)

_FIRST_TOKEN = (
    by_label(
        "Where the time to the first token goes",
        "Seconds a second by stage, of all requests together; the stages add up to the time to first token.",
        "s",
        sum_rate(table.STAGE, "stage"),
        "stage",
        is_stacked=True,
    ),
    by_label(
        "Mean of a stage",
        "Over the requests that had it.",
        "s",
        mean(table.STAGE, "stage"),
        "stage",
    ),
    quantiles("Wait in the group's queue", "Before the engine took a request up.", table.QUEUE),
)

WORKER_GROUP = Dashboard(
    uid="tandem-group",
    title="Tandem / Worker groups",
    description="Load, steps, what holds groups up, and where the time to the first token goes.",
    models=group.UP.shown_name,
    groups=group.UP.shown_name,
    rows=(
        Row("Now", 4, _NOW),
        Row("Load", 8, _LOAD),
        Row("Steps", 8, _STEPS),
        Row("What holds groups up", 8, _LIMITS),
        Row("Time to the first token", 8, _FIRST_TOKEN),
    ),
)
