"""What groups say of themselves, as metrics: the table, and the values of one group.

Series carry `model`, `group` and `role`. What Ray and Serve export of processes, nodes and GPUs is not here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from workers.metrics.spec import MetricSpec, Series, counter, gauge, histogram, histogram_series
from workers.report import BLOCK_S, STEP_S, STEP_TOKENS, TRANSFER_S, Bound, GroupReport
from workers.types import GroupInfo, GroupStats

GROUP_LABELS = ("model", "group", "role")

UP = gauge("engine_up", "1 when the group answers with tokens")
EPOCH = gauge("engine_epoch", "Starts of the group's ranks")
INFO = gauge(
    "engine_info",
    "1; what the group is",
    "dtype",
    "kv_dtype",
    "tensor_parallel",
    "block_size",
    "max_model_len",
)

# Load, and how long steps take.
RUNNING = gauge("engine_running", "Requests in the engine with blocks")
WAITING = gauge("engine_waiting", "Requests in the engine's queue")
WAITING_TOKENS = gauge("engine_waiting_tokens", "Prompt tokens of running and waiting requests to compute")
CONTEXT_TOKENS = gauge("engine_context_tokens", "Context tokens of running requests")
STEPS = counter("engine_steps", "Steps run")
STEP_SECONDS = histogram("engine_step_seconds", "Duration of a step", STEP_S, "kind")
STEP_TOKENS_COMPUTED = histogram("engine_step_tokens", "Tokens that a step computed", STEP_TOKENS, "kind")
STEP_MEAN = gauge("engine_step_mean_seconds", "Moving mean of a step's duration")
PREEMPTIONS = counter("engine_preemptions", "Sequences put back for want of blocks")

# Tokens and requests.
PROMPT_TOKENS = counter(
    "engine_prompt_tokens", "Prompt tokens of requests the engine admitted, by where they came from", "source"
)
GENERATED_TOKENS = counter("engine_generated_tokens", "Tokens the engine sampled")
DRAFT_TOKENS = counter("engine_draft_tokens", "Guessed tokens that were checked, by what they were", "guess")
GUESS_FAILURES = counter("engine_guess_failures", "Steps without guesses because making them failed")
GUESSES_OFF = gauge("engine_guesses_off", "1 when nothing is guessed any more because it failed")
FINISHED = counter("engine_finished", "Requests the engine ended, by how they did", "reason")

# KV blocks.
KV_BLOCKS = gauge("kv_blocks", "Blocks of the KV pool; the states add up to it", "state")
KV_BLOCK_BYTES = gauge("kv_block_bytes", "Bytes of a block, over all ranks")
KV_QUERY_TOKENS = counter("kv_query_tokens", "Prompt tokens that were looked up in the prefix cache")
KV_HIT_TOKENS = counter("kv_hit_tokens", "Of those, found there, read from other groups or not")
KV_EVICTIONS = counter("kv_evictions", "Cached blocks that were given to others")
KV_LIFETIME = histogram("kv_block_lifetime_seconds", "From a block's being full to its eviction", BLOCK_S)

# KV blocks of other groups.
_WAY = ("from_role", "to_role", "transport")
KV_LEASES = gauge("kv_leases", "Readers of the group's blocks now")
KV_LEASES_EXPIRED = counter("kv_leases_expired", "Readers of the group's blocks that fell silent")
KV_FETCHES = counter("kv_fetches", "Reads of other groups' blocks that were begun")
KV_FETCHED_TOKENS = counter("kv_fetched_tokens", "Prompt tokens of blocks that arrived from other groups")
KV_FETCH_FAILURES = counter("kv_fetch_failures", "Reads that brought less than was asked for", "reason")
KV_TRANSFER_BYTES = counter("kv_transfer_bytes", "Bytes of blocks that arrived from other groups", *_WAY)
KV_TRANSFER_SECONDS = histogram(
    "kv_transfer_seconds", "From the order to copy some blocks to their arrival", TRANSFER_S, *_WAY
)
KV_TRANSFER_FAILURES = counter("kv_transfer_failures", "Orders to copy blocks that brought none", *_WAY)
KV_TRANSFER_INFLIGHT = gauge("kv_transfer_inflight", "Orders to copy blocks under way")

# What recent steps are held up by.
FLOP = counter("engine_flop", "Floating-point operations of the model, in all steps")
READ_BYTES = counter("engine_read_bytes", "Bytes of weights and KV blocks that all steps had to read")
FLOP_CEILING = gauge("engine_flop_per_second_ceiling", "What the group's machines can compute, measured")
READ_CEILING = gauge("engine_read_bytes_per_second_ceiling", "What they can read from memory, measured")
BUSY = gauge("engine_busy_ratio", "Share of the last seconds that was spent in steps")
COMPUTE_USE = gauge("engine_compute_ratio", "Arithmetic of recent steps over its ceiling")
BANDWIDTH_USE = gauge("engine_bandwidth_ratio", "Memory reads of recent steps over their ceiling")
BOTTLENECK = gauge("engine_bottleneck", "1 for what holds recent steps up, 0 for the rest", "bound")

GROUP_METRICS: tuple[MetricSpec, ...] = (
    *(UP, EPOCH, INFO, RUNNING, WAITING, WAITING_TOKENS, CONTEXT_TOKENS),
    *(STEPS, STEP_SECONDS, STEP_TOKENS_COMPUTED, STEP_MEAN, PREEMPTIONS),
    *(PROMPT_TOKENS, GENERATED_TOKENS, DRAFT_TOKENS, GUESS_FAILURES, GUESSES_OFF, FINISHED),
    *(KV_BLOCKS, KV_BLOCK_BYTES, KV_QUERY_TOKENS, KV_HIT_TOKENS, KV_EVICTIONS, KV_LIFETIME),
    *(KV_LEASES, KV_LEASES_EXPIRED, KV_FETCHES, KV_FETCHED_TOKENS, KV_FETCH_FAILURES),
    *(KV_TRANSFER_BYTES, KV_TRANSFER_SECONDS, KV_TRANSFER_FAILURES, KV_TRANSFER_INFLIGHT),
    *(FLOP, READ_BYTES, FLOP_CEILING, READ_CEILING, BUSY, COMPUTE_USE, BANDWIDTH_USE, BOTTLENECK),
)


class GroupSight(NamedTuple):
    """What is known of a group now; `info` is None without a connection to it."""

    role: str
    epoch: int
    is_ready: bool
    info: GroupInfo | None
    stats: GroupStats
    report: GroupReport


_Value = Callable[[GroupStats], float]

_LEVELS: tuple[tuple[MetricSpec, str, _Value], ...] = (
    (RUNNING, "", lambda stats: stats.num_running),
    (WAITING, "", lambda stats: stats.num_waiting),
    (WAITING_TOKENS, "", lambda stats: stats.waiting_tokens),
    (CONTEXT_TOKENS, "", lambda stats: stats.running_tokens),
    (STEP_MEAN, "", lambda stats: stats.step_seconds),
    (GUESSES_OFF, "", lambda stats: stats.guesses_off),
    (KV_BLOCKS, "free", lambda stats: stats.free_blocks),
    (KV_BLOCKS, "cached", lambda stats: stats.cached_blocks),
    (KV_BLOCKS, "active", lambda stats: stats.active_blocks - stats.kv_transferring_blocks),
    (KV_BLOCKS, "transferring", lambda stats: stats.kv_transferring_blocks),
    (KV_LEASES, "", lambda stats: stats.kv_leases),
)
_TOTALS: tuple[tuple[MetricSpec, str, _Value], ...] = (
    (STEPS, "", lambda stats: stats.num_steps),
    (PREEMPTIONS, "", lambda stats: stats.preemptions_total),
    (PROMPT_TOKENS, "computed", lambda stats: stats.prompt_tokens_total - stats.cached_tokens_total),
    (PROMPT_TOKENS, "cached", lambda stats: stats.cached_tokens_total - stats.remote_tokens_total),
    (PROMPT_TOKENS, "remote", lambda stats: stats.remote_tokens_total),
    (GENERATED_TOKENS, "", lambda stats: stats.generated_tokens_total),
    (DRAFT_TOKENS, "accepted", lambda stats: stats.accepted_tokens_total),
    (DRAFT_TOKENS, "rejected", lambda stats: stats.drafted_tokens_total - stats.accepted_tokens_total),
    (GUESS_FAILURES, "", lambda stats: stats.guess_failures_total),
    (FINISHED, "stop", lambda stats: stats.finished_stop_total),
    (FINISHED, "length", lambda stats: stats.finished_length_total),
    (FINISHED, "error", lambda stats: stats.finished_error_total),
    (FINISHED, "cancelled", lambda stats: stats.cancelled_total),
    (KV_QUERY_TOKENS, "", lambda stats: stats.prompt_tokens_total),
    (KV_HIT_TOKENS, "", lambda stats: stats.cached_tokens_total),
    (KV_FETCHES, "", lambda stats: stats.kv_fetches_total),
    (KV_FETCHED_TOKENS, "", lambda stats: stats.kv_fetched_tokens_total),
    (KV_FETCH_FAILURES, "incomplete", lambda stats: stats.kv_fetches_incomplete_total),
    (KV_FETCH_FAILURES, "lost", lambda stats: stats.kv_fetches_lost_total),
    (KV_FETCH_FAILURES, "stalled", lambda stats: stats.kv_fetches_stalled_total),
    (KV_FETCH_FAILURES, "void", lambda stats: stats.kv_fetches_void_total),
    (KV_FETCH_FAILURES, "no_memory", lambda stats: stats.kv_fetches_no_memory_total),
    (KV_LEASES_EXPIRED, "", lambda stats: stats.kv_leases_expired_total),
)


def group_levels(group: GroupSight) -> Iterator[Series]:
    """The gauges of a group."""
    yield UP.name, "", 1 if group.is_ready else 0
    yield EPOCH.name, "", group.epoch
    info, report, usage = group.info, group.report, group.report.usage
    if info is not None:
        own = f"{info.dtype} {info.kv_dtype} {info.tensor_parallel} {info.block_size} {info.max_model_len}"
        yield INFO.name, own, 1
        yield KV_BLOCK_BYTES.name, "", info.kv_bytes_per_block
    for spec, label, value in _LEVELS:
        yield spec.name, label, value(group.stats)
    yield KV_TRANSFER_INFLIGHT.name, "", report.pulls_in_flight
    for bound in Bound:
        yield BOTTLENECK.name, bound.value, 1 if bound is usage.bound else 0
    yield BUSY.name, "", usage.busy_share
    yield COMPUTE_USE.name, "", usage.compute_share
    yield BANDWIDTH_USE.name, "", usage.bandwidth_share
    if report.flop_per_s_ceiling:
        yield FLOP_CEILING.name, "", report.flop_per_s_ceiling
        yield READ_CEILING.name, "", report.read_bytes_per_s_ceiling


def group_totals(group: GroupSight) -> Iterator[Series]:
    """The counters and histograms of a group, since the start of its epoch."""
    for spec, label, value in _TOTALS:
        yield spec.name, label, value(group.stats)
    report = group.report
    yield KV_EVICTIONS.name, "", report.evictions_total
    yield FLOP.name, "", report.flop_total
    yield READ_BYTES.name, "", report.read_bytes_total
    yield from histogram_series(KV_LIFETIME, "", report.block_lifetime)
    for steps in report.steps:
        yield from histogram_series(STEP_SECONDS, steps.kind.value, steps.seconds)
        yield from histogram_series(STEP_TOKENS_COMPUTED, steps.kind.value, steps.tokens)
    block_bytes = group.info.kv_bytes_per_block if group.info is not None else 0
    for pulls in report.pulls:
        way = f"{pulls.from_role} {group.role} {pulls.transport}"
        yield KV_TRANSFER_BYTES.name, way, pulls.num_blocks * block_bytes
        yield KV_TRANSFER_FAILURES.name, way, pulls.num_failed
        yield from histogram_series(KV_TRANSFER_SECONDS, way, pulls.seconds)
