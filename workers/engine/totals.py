"""What an engine says of itself: its load after every step, and what it has counted once in a while."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from workers.engine.block_pool import BlockPool
from workers.engine.drafting import Drafting
from workers.engine.exchange import KVExchange
from workers.engine.fetch import FetchEnd
from workers.engine.meter import StepMeter
from workers.engine.scheduler import Scheduler
from workers.report import GroupReport
from workers.types import FinishReason, GroupStats

_STEP_MEAN_WEIGHT: Final = 0.1  # of the newest step, in the moving mean of step_seconds


@dataclass(slots=True)
class EngineTotals:
    """What the engine itself has counted, beside its scheduler, pool and exchange."""

    num_generated: int = 0  # tokens
    num_drafted: int = 0  # guesses that were checked
    num_accepted: int = 0  # of those, the right ones
    step_seconds: float = 0.0  # moving mean
    step_seconds_total: float = 0.0
    # Requests, by the reason of the choice that ended last.
    num_ended: dict[FinishReason, int] = field(default_factory=lambda: dict.fromkeys(FinishReason, 0))

    def add_step(self, seconds: float) -> None:
        """A step took so long."""
        is_first = self.step_seconds_total == 0.0
        self.step_seconds_total += seconds
        self.step_seconds += (1.0 if is_first else _STEP_MEAN_WEIGHT) * (seconds - self.step_seconds)


def group_stats(
    scheduler: Scheduler,
    pool: BlockPool,
    exchange: KVExchange,
    totals: EngineTotals,
    drafting: Drafting | None,
) -> GroupStats:
    """Load and totals now."""
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
        step_seconds=totals.step_seconds,
        step_seconds_total=totals.step_seconds_total,
        prompt_tokens_total=scheduler.prompt_tokens_total,
        cached_tokens_total=scheduler.cached_tokens_total,
        remote_tokens_total=scheduler.remote_tokens_total,
        generated_tokens_total=totals.num_generated,
        drafted_tokens_total=totals.num_drafted,
        accepted_tokens_total=totals.num_accepted,
        guess_failures_total=0 if drafting is None else drafting.failures.num_total,
        guesses_off=int(drafting is not None and drafting.failures.is_off),
        preemptions_total=scheduler.preemptions_total,
        finished_stop_total=totals.num_ended[FinishReason.STOP],
        finished_length_total=totals.num_ended[FinishReason.LENGTH],
        finished_error_total=totals.num_ended[FinishReason.ERROR],
        cancelled_total=totals.num_ended[FinishReason.CANCELLED],
        kv_fetches_total=fetches.started_total,
        kv_fetched_tokens_total=fetches.fetched_tokens_total,
        kv_fetches_incomplete_total=fetches.ended_total[FetchEnd.INCOMPLETE],
        kv_fetches_lost_total=fetches.ended_total[FetchEnd.LOST],
        kv_fetches_stalled_total=fetches.ended_total[FetchEnd.STALLED],
        kv_fetches_void_total=fetches.ended_total[FetchEnd.VOID],
        kv_fetches_no_memory_total=fetches.ended_total[FetchEnd.NO_MEMORY],
        kv_transferring_blocks=fetches.num_in_flight,
        kv_leases=len(leases),
        kv_leases_expired_total=leases.expired_total,
        kv_sources=fetches.counts.by_source(),
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
