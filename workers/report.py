"""What a group's engine has counted since its start, for metrics: finer than its load, and sent less often.

Totals and counts never fall within an epoch. Placement decides nothing by it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from workers.histogram import HistogramCounts, doubling

STEP_TOKENS = doubling(1.0, 15)  # bounds of histograms: 1 .. 16,384 tokens
STEP_S = doubling(0.0002, 14)  # 0.2 ms .. 1.6 s
TRANSFER_S = doubling(0.0005, 15)  # 0.5 ms .. 8 s
BLOCK_S = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0,
    2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 1800.0,
)  # fmt: skip


class StepKind(Enum):
    """What a step computed."""

    PREFILL = "prefill"  # prompt tokens only
    DECODE = "decode"  # a next token for each of its sequences
    MIXED = "mixed"


class Bound(Enum):
    """What the group's recent steps were held up by."""

    IDLE = "idle"  # there were hardly any
    COMPUTE = "compute"  # arithmetic
    BANDWIDTH = "bandwidth"  # reading weights and KV blocks
    OVERHEAD = "overhead"  # neither explains how long they took


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCounts:
    """Steps of one kind."""

    kind: StepKind
    tokens: HistogramCounts  # by STEP_TOKENS
    seconds: HistogramCounts  # by STEP_S


@dataclass(frozen=True, slots=True, kw_only=True)
class PullCounts:
    """KV blocks pulled from groups of one role by one transport; a request may need several pulls."""

    from_role: str
    transport: str  # "none": it ended without one
    seconds: HistogramCounts  # by TRANSFER_S, of those that brought their blocks
    num_blocks: int  # that they brought
    num_failed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """How near recent steps came to the ceilings of the machine. Shares are of the time in steps."""

    bound: Bound = Bound.IDLE
    busy_share: float = 0.0  # of the time, in steps
    compute_share: float = 0.0  # of the ceiling of arithmetic
    bandwidth_share: float = 0.0  # of the ceiling of reading memory


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReport:
    """Everything, as of one moment."""

    steps: tuple[StepCounts, ...] = ()
    evictions_total: int = 0  # cached blocks given to others
    # By BLOCK_S: from a block's being full to its eviction.
    block_lifetime: HistogramCounts = field(default_factory=HistogramCounts)
    pulls: tuple[PullCounts, ...] = ()
    pulls_in_flight: int = 0
    flop_total: float = 0.0  # of the model, in all steps
    read_bytes_total: float = 0.0  # weights and KV blocks, in all steps
    flop_per_s_ceiling: float = 0.0  # of the group's machines; 0: not measured
    read_bytes_per_s_ceiling: float = 0.0
    usage: Usage = field(default_factory=Usage)
