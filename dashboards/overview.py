"""The overview: what clients get, and what the worker groups do for it.

Series of router replicas and of groups are each told once, so sums over them count nothing twice.
"""

from __future__ import annotations

from dashboards.grafana import Dashboard, Panel, Query, Row

_OF = '{model=~"$model"}'


def _rate(name: str) -> str:
    return f"rate(tandem_{name}{_OF}[$__rate_interval])"


def _sum_rate(name: str) -> str:
    return f"sum({_rate(name)})"


def _quantile(share: float, name: str) -> str:
    return f"histogram_quantile({share:g}, sum by (le) ({_rate(name + '_bucket')}))"


def _percentiles(title: str, description: str, name: str) -> Panel:
    queries = tuple(Query(_quantile(share, name), f"p{share * 100:g}") for share in (0.5, 0.95, 0.99))
    return Panel(title=title, description=description, unit="s", queries=queries)


def _stat(title: str, description: str, unit: str, expression: str) -> Panel:
    query = Query(expression)
    return Panel(title=title, description=description, unit=unit, queries=(query,), kind="stat", width=4)


_ERRORS = f"({_sum_rate('client_errors_total')} + {_sum_rate('server_errors_total')})"
# Shares of nothing are left out (> 0): idle times show as gaps.
_CACHED_SHARE = f"{_sum_rate('cached_prompt_tokens_total')} / ({_sum_rate('prompt_tokens_total')} > 0)"

_NOW = (
    _stat(
        "Groups that answer",
        "Worker groups from which a token has come in their present start.",
        "short",
        f"sum(tandem_engine_up{_OF})",
    ),
    _stat("Requests", "Admitted requests that ended, a second.", "reqps", _sum_rate("requests_total")),
    _stat(
        "Errors",
        "4xx and 5xx answers, as a share of these and of what was admitted.",
        "percentunit",
        f"{_ERRORS} / ({_ERRORS} + {_sum_rate('requests_total')} > 0)",
    ),
    _stat("Output", "Tokens delivered, a second.", "short", _sum_rate("generation_tokens_total")),
    _stat(
        "First token, p95",
        "From a request's arrival to its first token, with the time it waited.",
        "s",
        _quantile(0.95, "ttft_seconds"),
    ),
    _stat(
        "Prompt from cache",
        "Share of prompt tokens that a group had computed before.",
        "percentunit",
        _CACHED_SHARE,
    ),
)

_CLIENTS = (
    Panel(
        title="Requests by reason",
        description="How admitted requests ended, a second.",
        unit="reqps",
        queries=(Query(f"sum by (reason) ({_rate('requests_total')})", "{{reason}}"),),
        is_stacked=True,
    ),
    Panel(
        title="Errors by code",
        description="Answers that refuse or fail, a second.",
        unit="reqps",
        queries=(
            Query(f"sum by (code) ({_rate('client_errors_total')})", "4xx {{code}}"),
            Query(f"sum by (code) ({_rate('server_errors_total')})", "5xx {{code}}"),
            Query(_sum_rate("client_disconnects_total"), "clients that left"),
        ),
    ),
    Panel(
        title="Tokens",
        description="Prompt tokens admitted, those of them found in a cache, and tokens delivered, a second.",
        unit="short",
        queries=(
            Query(_sum_rate("prompt_tokens_total"), "prompt"),
            Query(_sum_rate("cached_prompt_tokens_total"), "prompt, cached"),
            Query(_sum_rate("generation_tokens_total"), "output"),
        ),
    ),
    _percentiles("Time to first token", "With the time a request waited.", "ttft_seconds"),
    _percentiles("Time between tokens", "Gaps between tokens of a choice, at the router.", "itl_seconds"),
    _percentiles("Whole request", "From arrival to end.", "e2e_seconds"),
)

_GROUPS = (
    Panel(
        title="Queue",
        description="Requests without a token yet: at the routers, and of those in the engines' queues.",
        unit="short",
        queries=(
            Query(f"sum(tandem_queue_requests{_OF})", "without a token"),
            Query(f"sum(tandem_engine_waiting{_OF})", "waiting in engines"),
            Query(f"sum(tandem_engine_running{_OF})", "running in engines"),
            Query(f"sum(tandem_requests_inflight{_OF})", "in flight"),
        ),
    ),
    Panel(
        title="KV blocks",
        description="Active: held by requests. Cached: can be found again or evicted.",
        unit="short",
        queries=(Query(f"sum by (state) (tandem_kv_blocks{_OF})", "{{state}}"),),
        is_stacked=True,
    ),
    Panel(
        title="Cache hits of groups",
        description="Share of admitted prompt tokens that the group's own cache had.",
        unit="percentunit",
        queries=(
            Query(
                f"sum by (group) ({_rate('kv_hit_tokens_total')})"
                f" / (sum by (group) ({_rate('kv_query_tokens_total')}) > 0)",
                "{{group}}",
            ),
        ),
    ),
    Panel(
        title="Groups up",
        description="1: a token has come from the group in its present start.",
        unit="short",
        queries=(Query(f"max by (group) (tandem_engine_up{_OF})", "{{group}}"),),
    ),
    Panel(
        title="Steps",
        description="Moving mean of a step's duration.",
        unit="s",
        queries=(Query(f"max by (group) (tandem_engine_step_mean_seconds{_OF})", "{{group}}"),),
    ),
    Panel(
        title="Age of counts",
        description="How old each router replica's counts are in this answer. One that grows has ended; its "
        "series leave after ten minutes. Failures: exchanges with the other replicas that did not work.",
        unit="s",
        queries=(
            Query(f"max by (replica) (tandem_telemetry_age_seconds{_OF})", "{{replica}}"),
            Query(_sum_rate("telemetry_failures_total"), "failures a second"),
        ),
    ),
)

_PAIR_NAME = "{{source}} to {{reader}}"
_EXCHANGE = (
    Panel(
        title="Blocks to come from",
        description="Requests placed, a second, by who was to give KV blocks of their prompt: a prefill "
        "group that computes it, a neighbour that has it cached, or none.",
        unit="reqps",
        queries=(Query(f"sum by (source) ({_rate('kv_source_decisions_total')})", "{{source}}"),),
        is_stacked=True,
    ),
    Panel(
        title="Prompts at prefill groups",
        description="By how it ended, a second. Overtaken: the answer had begun without it.",
        unit="reqps",
        queries=(Query(f"sum by (outcome) ({_rate('prefill_dispatches_total')})", "{{outcome}}"),),
        is_stacked=True,
    ),
    Panel(
        title="Read or computed again",
        description="Prompt tokens that were to be read from another group, a second.",
        unit="short",
        queries=(
            Query(_sum_rate("kv_pulled_tokens_total"), "read"),
            Query(_sum_rate("kv_recomputed_tokens_total"), "computed after all"),
        ),
        is_stacked=True,
    ),
    Panel(
        title="Reads that brought less",
        description="By reason, a second; and sources that failed, by who was to give instead.",
        unit="ops",
        queries=(
            Query(f"sum by (reason) ({_rate('kv_fetch_failures_total')})", "{{reason}}"),
            Query(f"sum by (source) ({_rate('kv_redirects_total')})", "instead: {{source}}"),
        ),
    ),
    Panel(
        title="Reads under way",
        description="Orders to copy some blocks that have not ended.",
        unit="short",
        queries=(Query(f"max by (group) (tandem_kv_transfer_inflight{_OF})", "{{group}}"),),
    ),
    Panel(
        title="Readers",
        description="Leases on a group's blocks, and those that ended because their reader was silent.",
        unit="short",
        queries=(
            Query(f"max by (group) (tandem_kv_leases{_OF})", "{{group}}"),
            Query(_sum_rate("kv_leases_expired_total"), "expired a second"),
        ),
    ),
    Panel(
        title="Reads by pair",
        description="A second; failed: those that brought nothing, though the source had it.",
        unit="ops",
        queries=(
            Query(f"sum by (source, reader) ({_rate('kv_pair_reads_total')})", _PAIR_NAME),
            Query(f"sum by (source, reader) ({_rate('kv_pair_failures_total')})", f"failed: {_PAIR_NAME}"),
        ),
    ),
    Panel(
        title="Bytes between groups",
        description="KV blocks that came, a second.",
        unit="Bps",
        queries=(Query(f"sum by (source, reader) ({_rate('kv_pair_bytes_total')})", _PAIR_NAME),),
        is_stacked=True,
    ),
    Panel(
        title="Speed of a read",
        description="As requests saw it, and placement expects of the next one; mean of the routers.",
        unit="Bps",
        queries=(Query(f"avg by (source, reader) (tandem_kv_pair_bytes_per_second{_OF})", _PAIR_NAME),),
    ),
)

OVERVIEW = Dashboard(
    uid="tandem-overview",
    title="Tandem overview",
    tags=("tandem",),
    models="tandem_requests_total",
    rows=(
        Row("Now", 4, _NOW),
        Row("Clients", 8, _CLIENTS),
        Row("Worker groups and routers", 8, _GROUPS),
        Row("KV blocks between groups", 8, _EXCHANGE),
    ),
)
