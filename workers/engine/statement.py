"""What an engine says of itself: its load after every step, and what it has counted once in a while."""

from __future__ import annotations

from collections.abc import Mapping

from workers.engine.block_pool import BlockPool
from workers.engine.exchange import KVExchange
from workers.engine.fetch import FetchEnd
from workers.engine.meter import StepMeter
from workers.engine.scheduler import Scheduler
from workers.report import GroupReport
from workers.types import FinishReason, GroupStats


def group_stats(
    scheduler: Scheduler,
    pool: BlockPool,
    exchange: KVExchange,
    *,
    ended: Mapping[FinishReason, int],
    num_generated: int,
    step_seconds: float,
    step_seconds_total: float,
    block_size: int,
) -> GroupStats:
    """Load and totals now. `ended`: requests, by the reason of their last choice."""
    fetches, leases = exchange.fetches, exchange.leases
    return GroupStats(
        num_running=scheduler.num_running,
        num_waiting=scheduler.num_waiting,
        waiting_tokens=scheduler.waiting_tokens - fetches.coming_tokens,
        running_tokens=scheduler.running_tokens,
        free_blocks=pool.num_unused,
        cached_blocks=pool.num_evictable,
        active_blocks=pool.num_active,
        num_steps=scheduler.num_steps,
        step_seconds=step_seconds,
        step_seconds_total=step_seconds_total,
        prompt_tokens_total=scheduler.prompt_tokens_total,
        cached_tokens_total=scheduler.cached_tokens_total,
        remote_tokens_total=scheduler.remote_tokens_total,
        generated_tokens_total=num_generated,
        preemptions_total=scheduler.preemptions_total,
        finished_stop_total=ended[FinishReason.STOP],
        finished_length_total=ended[FinishReason.LENGTH],
        finished_error_total=ended[FinishReason.ERROR],
        cancelled_total=ended[FinishReason.CANCELLED],
        kv_fetches_total=fetches.started_total,
        kv_fetched_tokens_total=fetches.fetched_blocks_total * block_size,
        kv_fetches_incomplete_total=fetches.ended_total[FetchEnd.INCOMPLETE],
        kv_fetches_lost_total=fetches.ended_total[FetchEnd.LOST],
        kv_fetches_stalled_total=fetches.ended_total[FetchEnd.STALLED],
        kv_fetches_void_total=fetches.ended_total[FetchEnd.VOID],
        kv_fetches_no_memory_total=fetches.ended_total[FetchEnd.NO_MEMORY],
        kv_transferring_blocks=fetches.num_in_flight,
        kv_leases=len(leases),
        kv_leases_expired_total=leases.expired_total,
        kv_sources=fetches.counts.told(),
    )


def group_report(meter: StepMeter, pool: BlockPool, exchange: KVExchange) -> GroupReport:
    """All that has been counted; the meter takes it as told."""
    fetches = exchange.fetches
    return GroupReport(
        steps=meter.steps(),
        evictions_total=pool.evictions_total,
        block_lifetime=pool.lifetime_s.counts_now(),
        pulls=fetches.meter.counts(),
        pulls_in_flight=fetches.num_pulls,
        flop_total=meter.flop_total,
        read_bytes_total=meter.read_bytes_total,
        flop_per_s_ceiling=meter.ceilings.flop_per_s,
        read_bytes_per_s_ceiling=meter.ceilings.read_bytes_per_s,
        usage=meter.usage(),
    )
