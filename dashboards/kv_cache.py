"""KV blocks: what the pools hold, what the caches save, and what goes from group to group."""

from __future__ import annotations

from dashboards.fleet import ALL_BLOCKS, USED_BLOCKS
from dashboards.grafana import Dashboard, Query, Row
from dashboards.promql import (
    average,
    by_label,
    heatmap,
    highest,
    level,
    lines,
    quantile,
    rate,
    share,
    stat,
    total,
    total_rate,
)
from router.telemetry import table
from workers.metrics import group

_WAY = ("from_role", "to_role", "transport")
_WAY_NAME = "{{from_role}} to {{to_role}}, {{transport}}"
_PAIR_NAME = "{{source}} to {{reader}}"


def _role(name: str) -> str:
    return f'role="{name}"'


def _busy(role: str) -> str:
    return average(level(group.BUSY, _role(role)))


_NOW = (
    stat(
        "Blocks in use",
        "Share of all pools that requests hold.",
        "percentunit",
        share(USED_BLOCKS, ALL_BLOCKS),
        thresholds=(0.8, 0.95),
    ),
    stat(
        "Found in caches",
        "Share of prompt tokens whose blocks were there.",
        "percentunit",
        share(total_rate(group.KV_HIT_TOKENS), total_rate(group.KV_QUERY_TOKENS)),
    ),
    stat("Prefill saved", "Prompt tokens a second not computed.", "short", total_rate(group.KV_HIT_TOKENS)),
    stat("Evictions", "Cached blocks given to others, a second.", "ops", total_rate(group.KV_EVICTIONS)),
    stat("Between groups", "Bytes of blocks a second.", "Bps", total_rate(group.KV_TRANSFER_BYTES)),
    stat(
        "Copies under way", "Orders that have not ended.", "short", total(level(group.KV_TRANSFER_INFLIGHT))
    ),
    stat("Readers", "Leases on blocks.", "short", total(level(group.KV_LEASES))),
    stat(
        "Failed copies",
        "Orders that brought no block, a second.",
        "ops",
        total_rate(group.KV_TRANSFER_FAILURES),
        thresholds=(0.001, 0.1),
    ),
)

_POOLS = (
    by_label(
        "Blocks by state",
        "Active: held by requests. Cached: can be found again or given up. Transferring: being filled.",
        "short",
        total(level(group.KV_BLOCKS), "state"),
        "state",
        is_stacked=True,
    ),
    by_label(
        "Found in caches",
        "Share of admitted prompt tokens, for each group.",
        "percentunit",
        share(total_rate(group.KV_HIT_TOKENS, "group"), total_rate(group.KV_QUERY_TOKENS, "group")),
        "group",
    ),
    lines(
        "Prompt tokens",
        "Looked up, found, and computed; a second.",
        "short",
        Query(total_rate(group.KV_QUERY_TOKENS), "looked up"),
        Query(total_rate(group.KV_HIT_TOKENS), "found"),
        Query(total(rate(group.PROMPT_TOKENS, 'source="computed"')), "computed"),
    ),
    by_label(
        "Evictions",
        "Cached blocks given to others, a second.",
        "ops",
        total_rate(group.KV_EVICTIONS, "group"),
        "group",
    ),
    heatmap("Life of a block", "From full to evicted; blocks a second.", "s", group.KV_LIFETIME),
    by_label(
        "Bytes of the pools",
        "Blocks in all states times their size.",
        "bytes",
        f"{total(level(group.KV_BLOCKS), 'group')}"
        f" * on (group) {highest(level(group.KV_BLOCK_BYTES), 'group')}",
        "group",
        is_stacked=True,
    ),
)

_COPIES = (
    lines(
        "Bytes between groups",
        "Of blocks that arrived, a second.",
        "Bps",
        Query(total_rate(group.KV_TRANSFER_BYTES, *_WAY), _WAY_NAME),
        is_stacked=True,
    ),
    lines(
        "Time of a copy",
        "From the order to the arrival of its blocks.",
        "s",
        Query(quantile(0.5, group.KV_TRANSFER_SECONDS, *_WAY), f"p50 {_WAY_NAME}"),
        Query(quantile(0.99, group.KV_TRANSFER_SECONDS, *_WAY), f"p99 {_WAY_NAME}"),
    ),
    lines(
        "Tokens that arrived",
        "Prompt tokens of blocks from other groups, a second.",
        "short",
        Query(total_rate(group.KV_FETCHED_TOKENS, "group"), "{{group}}"),
    ),
    lines(
        "Reads that brought less",
        "By reason, beside all that were begun; and orders to copy that brought nothing. A second.",
        "ops",
        Query(total_rate(group.KV_FETCHES), "begun"),
        Query(total_rate(group.KV_FETCH_FAILURES, "reason"), "{{reason}}"),
        Query(total_rate(group.KV_TRANSFER_FAILURES), "copies without a block"),
    ),
    by_label(
        "Copies under way",
        "Orders that have not ended.",
        "short",
        highest(level(group.KV_TRANSFER_INFLIGHT), "group"),
        "group",
    ),
    lines(
        "Readers",
        "Leases on a group's blocks, and those that ended because their reader was silent.",
        "short",
        Query(highest(level(group.KV_LEASES), "group"), "{{group}}"),
        Query(total_rate(group.KV_LEASES_EXPIRED), "expired a second"),
    ),
)

_PAIRS = (
    lines(
        "Reads by pair",
        "A second; failed: those that brought nothing, though the source had it.",
        "ops",
        Query(total_rate(table.KV_PAIR_READS, "source", "reader"), _PAIR_NAME),
        Query(total_rate(table.KV_PAIR_FAILURES, "source", "reader"), f"failed: {_PAIR_NAME}"),
    ),
    lines(
        "Bytes by pair",
        "A second.",
        "Bps",
        Query(total_rate(table.KV_PAIR_BYTES, "source", "reader"), _PAIR_NAME),
        is_stacked=True,
    ),
    lines(
        "Speed of a read",
        "Bytes by the seconds on their way, as readers tell; what placement expects of the next one.",
        "Bps",
        Query(average(level(table.KV_PAIR_RATE), "source", "reader"), _PAIR_NAME),
    ),
)

_POOLS_APART = (
    by_label(
        "Prompt tokens to compute, by pool",
        "Of the prefill pool: its queue. Of the decode pool: what it computes itself.",
        "short",
        total(level(group.WAITING_TOKENS), "role"),
        "role",
    ),
    by_label(
        "Requests in engines, by pool",
        "With blocks or waiting.",
        "short",
        f"{total(level(group.RUNNING), 'role')} + {total(level(group.WAITING), 'role')}",
        "role",
    ),
    lines(
        "Which pool to scale",
        "Busy share of each pool. Prefill over decode: well above 1, more prefill groups; well below, more "
        "decode groups.",
        "short",
        Query(average(level(group.BUSY), "role"), "busy: {{role}}"),
        Query(share(_busy("prefill"), _busy("decode")), "prefill over decode"),
    ),
    by_label(
        "Blocks to come from",
        "Requests placed, a second, by who was to give blocks of their prompt: a prefill group that computes "
        "it, a neighbour that has it cached, or none.",
        "reqps",
        total_rate(table.KV_SOURCES, "source"),
        "source",
        is_stacked=True,
    ),
    by_label(
        "Prompts at prefill groups",
        "By how it ended, a second. Overtaken: the answer had begun without it.",
        "reqps",
        total_rate(table.PREFILLS, "outcome"),
        "outcome",
        is_stacked=True,
    ),
    lines(
        "Read or computed again",
        "Prompt tokens that were to be read from another group, a second.",
        "short",
        Query(total_rate(table.KV_PULLED), "read"),
        Query(total_rate(table.KV_RECOMPUTED), "computed after all"),
        is_stacked=True,
    ),
)

KV_CACHE = Dashboard(
    uid="tandem-kv-cache",
    title="Tandem / KV cache and disaggregation",
    description="What the pools hold, what the caches save, and what goes from group to group.",
    models=group.UP.shown_name,
    groups=group.UP.shown_name,
    rows=(
        Row("Now", 4, _NOW),
        Row("Pools and caches", 8, _POOLS),
        Row("Copies between groups", 8, _COPIES),
        Row("From whom to whom", 8, _PAIRS),
        Row("Prefill and decode apart", 8, _POOLS_APART),
    ),
)
