"""What devices can do at best with a model, and what they should really do: decode and prefill rates, and
where decode stops waiting for memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cluster.figures.step_cost import StepCost
from cluster.plan.arithmetic import attended_pairs, linear_flop, pair_flop
from cluster.plan.devices import Roofs
from cluster.plan.roofline import Load

BATCHES = (1, 8, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRow:
    """Decode of a batch whose requests all have the planned context."""

    batch: int
    fits: bool  # in the KV pool
    runs: bool  # no more than max_running
    limit_tokens_per_s: float  # of the whole batch: B / ((weights + KV bytes) / bandwidth), or by products
    expected_tokens_per_s: float
    intensity: float  # operations a byte
    bound: str  # bandwidth or compute


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillRow:
    """Prefill of one prompt."""

    tokens: int
    linear_flop: float  # 2 x parameters of the layers' matrices x T
    attention_flop: float  # 4 x L x A x D x pairs of query and key
    limit_tokens_per_s: float
    expected_tokens_per_s: float
    expected_s: float
    bound: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Batch from which a decode step takes longer to multiply than to read; None where it never does."""

    weights_alone: float  # contexts so short that their keys and values do not count
    at_context: float | None


def decode_rows(
    load: Load,
    roofs: Roofs,
    cost: StepCost,
    *,
    is_measured: bool,
    context: int,
    most: int,
    max_running: int,
    batches: Sequence[int] = BATCHES,
) -> list[DecodeRow]:
    """is_measured: the cost; a derived one reads all experts, which a small batch does not. most: requests
    that the pool holds; max_running: that the scheduler lets run."""
    rows = []
    for batch in sorted({*batches, most} if 0 < most <= 4096 else {*batches}):
        work = load.decode(batch, context)
        read_share = 1.0 if is_measured else load.read_weight_bytes(batch) / load.weight_bytes
        of_batch = replace(cost, weights_s=cost.weights_s * read_share)
        rows.append(
            DecodeRow(
                batch=batch,
                fits=batch <= most,
                runs=batch <= max_running,
                limit_tokens_per_s=batch / work.seconds(roofs),
                expected_tokens_per_s=of_batch.decode_tokens_per_s(batch, context),
                intensity=work.intensity,
                bound=_bound(work.is_bandwidth_bound(roofs)),
            )
        )
    return rows


def prefill_rows(
    load: Load, roofs: Roofs, cost: StepCost, lengths: Sequence[int], *, step_tokens: int
) -> list[PrefillRow]:
    rows = []
    for tokens in lengths:
        work = load.prefill(tokens)
        seconds = cost.prefill_seconds(tokens, step_tokens=step_tokens)
        rows.append(
            PrefillRow(
                tokens=tokens,
                linear_flop=linear_flop(load.spec, tokens),
                attention_flop=pair_flop(load.spec) * attended_pairs(load.spec, tokens),
                limit_tokens_per_s=tokens / work.seconds(roofs),
                expected_tokens_per_s=tokens / seconds,
                expected_s=seconds,
                bound=_bound(work.is_bandwidth_bound(roofs)),
            )
        )
    return rows


def turn_of(load: Load, roofs: Roofs, context: int) -> Turn:
    at_context = load.turning_batch(roofs, context)
    return Turn(
        weights_alone=load.turning_batch(roofs), at_context=None if math.isinf(at_context) else at_context
    )


def _bound(is_bandwidth: bool) -> str:
    return "bandwidth" if is_bandwidth else "compute"
