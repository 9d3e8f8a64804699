"""What autoscaling aims at: part of the config tree, and small enough to travel with every report."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingTargets:
    """Config path `scaling`. Bounds of a pool are `autoscaling_config` of its deployment."""

    ttft_s: float = 1.0  # time to the first token that requests should see
    tpot_s: float = 0.1  # and between tokens
    max_kv_use: float = 0.8  # share of a group's KV blocks that requests may hold
    drain_s: float = 5.0  # how soon prompts that have piled up are to be computed
    headroom: float = 0.75  # share of its computing that a group is planned for
    prefill_per_decode: float | None = None  # groups of the one pool for one of the other; None: as needed
    scale_down_after_s: float = 60.0  # so long must fewer groups have been enough
    min_reversal_s: float = 60.0  # least time between two changes of direction
    idle_to_zero_s: float = 120.0  # a pool without work for so long goes to zero, where its bounds allow it
    settle_s: float = 30.0  # after a change, what was measured before it does not count for so long
    step_cost: str | None = None  # file of `tandem bench calibrate`, absolute; None: that of a small CPU
