"""The rounded figures of teaching texts, and why the plan's own differ."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cluster.figures.words import counted
from cluster.plan.arithmetic import kv_bytes_per_token, prefill_flop, textbook_prefill_flop
from cluster.plan.devices import Device
from cluster.plan.models import PlannedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class TextbookFigures:
    """Parameters rounded to one digit, two bytes each, and nothing kept back for anything else."""

    weight_bytes: int
    request_bytes: int  # keys and values of one request
    num_requests: int  # floor of what is left over a request
    decode_tokens_per_s: float  # bandwidth over weight bytes, batch 1
    prefill_flop: int  # 2 x L x H^2 x T
    times_too_low: float  # of that, against the whole count


def textbook_figures(model: PlannedModel, device: Device, context: int) -> TextbookFigures:
    """For 16-bit weights and keys."""
    weights = 2 * _one_digit(model.num_parameters)
    request = kv_bytes_per_token(model.spec) * context
    short = textbook_prefill_flop(model.spec, context)
    return TextbookFigures(
        weight_bytes=weights,
        request_bytes=request,
        num_requests=max(0, (device.memory_bytes - weights) // request),
        decode_tokens_per_s=device.read_bytes_per_s / weights,
        prefill_flop=short,
        times_too_low=prefill_flop(model.spec, context) / short,
    )


def notes(model: PlannedModel, device: Device, context: int) -> list[str]:
    """Sentences that lead from the well-known figures to the plan's."""
    found = textbook_figures(model, device, context)
    requests = counted(found.num_requests, "request")
    return [
        f"Textbook: floor(({device.memory_bytes >> 20:,} MiB - {found.weight_bytes / 1e9:g} GB) / "
        f"{found.request_bytes >> 20:,} MiB) = {requests}. The plan takes exact weights "
        "and subtracts reserve, activations and buffers.",
        f"Textbook: {_rate(device.read_bytes_per_s)} / {found.weight_bytes / 1e9:g} GB = "
        f"{found.decode_tokens_per_s:.0f} tokens/s at batch 1. The plan leaves out the embedding table, of "
        "which a step reads a few rows, and counts keys and values.",
        f"Textbook: 2 x L x H^2 x T = {_flop(found.prefill_flop)} for {context:,} tokens counts "
        f"one H x H product a layer: {math.floor(found.times_too_low)} times too low.",
    ]


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e12:g} TB/s" if bytes_per_s >= 1e12 else f"{bytes_per_s / 1e9:.3g} GB/s"


def _flop(flop: float) -> str:
    return f"{flop / 1e12:.1f} TFLOP" if flop >= 1e12 else f"{flop / 1e9:.1f} GFLOP"


def _one_digit(number: int) -> int:
    """Rounded to its first digit."""
    zeros = len(str(number)) - 1
    return round(number, -zeros)
