"""Measures ceilings and engine steps, fits the cost of a step, and checks it on shapes it has not seen.

Steps of a pass: decoding at several batches and contexts, single prompts of several lengths, one batch whose
prompts and decode rows share steps; the checks between them. Passes are repeated while time lasts, so that a
moment in which the machine is disturbed is outvoted: a sample is the median of equal shapes.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from cluster.bench.engine import BenchEngine, EngineRun, TimedStep
from cluster.bench.orders import CalibrateOrder
from cluster.bench.roofs import GpuRoofMeter, RoofMeter, roof_meter
from cluster.bench.subject import Prompts, open_engine
from cluster.figures.machine import facts, machine_name
from cluster.figures.step_cost import StepCost, StepShape
from cluster.plan.fit import Sample, fit, residuals
from workers.runtime.kv_pool import free_bytes
from workers.runtime.rank import RankFacts

_NEW_TOKENS = 24
# Batch and prompt length of the decode steps that are measured.
_DECODES = ((1, 128), (1, 1024), (4, 128), (8, 128), (8, 1024), (16, 128), (32, 128), (64, 64), (128, 32))
_MIXED = (32, 128)  # of which the steps with prompts are kept, too
_PROMPTS = (16, 64, 128, 256, 512, 2048)  # single
# Checked right after these, because the machine changes its mood in the course of a pass.
_CHECK_AFTER = ((1, 1024), (8, 1024), (32, 128))
_CHECK_PROMPT, _CHECK_CONTEXT, _CHECK_TOKENS = 200, 96, 48

Report = Callable[[str], None]


def calibrate(order: CalibrateOrder, report: Report) -> dict[str, Any]:
    """The result as plain data: `cost`, `about`, `samples`, `checks`, `pool`."""
    report(f"loading {order.engine.model}")
    free_before = free_bytes(torch.device("cpu"))
    with open_engine(order.engine) as engine:
        found = engine.facts
        meter = roof_meter(found.device)
        prompts = Prompts(found.limits.vocab_size)
        session = _Session(engine, meter, prompts)
        engine.run(prompts.take(2, 32), 4)  # memory and code are touched once, untimed
        started = time.monotonic()
        passes, longest = 0, 0.0
        while not passes or time.monotonic() - started + longest <= order.seconds:
            began = time.monotonic()
            passes += 1
            report(f"pass {passes}")
            session.measure(report)
            longest = max(longest, time.monotonic() - began)
    samples = session.samples()
    cost = fit(samples)
    roofs, in_float32 = meter.roofs(), meter.roofs("float32")
    return {
        "cost": asdict(cost),
        "about": {
            "model": order.engine.model,
            "model_hash": found.model_hash,
            "dtype": found.dtype,
            "quantization": order.engine.quantization,
            "tensor_parallel": found.tensor_parallel,
            "device": found.device,
            "machine": machine_name(),
            "gpu_memory_bytes": _gpu_memory(found.device),
            "read_bytes_per_s": roofs.read_bytes_per_s,
            "flop_per_s": roofs.flop_per_s,
            "float32_flop_per_s": in_float32.flop_per_s,
            "passes": passes,
            "measured_on": facts(),
        },
        "samples": [
            {**asdict(sample.shape), "seconds": sample.seconds, "residual": round(error, 4)}
            for sample, error in zip(samples, residuals(cost, samples), strict=True)
        ],
        "checks": session.checks(cost),
        "pool": _pool(found, free_before),
    }


class _Session:
    """What was measured over all passes."""

    def __init__(self, engine: BenchEngine, meter: RoofMeter | GpuRoofMeter, prompts: Prompts) -> None:
        self._engine = engine
        self._meter = meter
        self._prompts = prompts
        self._seconds: defaultdict[StepShape, list[float]] = defaultdict(list)
        # Of each batch: tokens a second in decode, and in prefill.
        self._decode: defaultdict[int, list[float]] = defaultdict(list)
        self._prefill: defaultdict[int, list[float]] = defaultdict(list)
        longest = engine.facts.limits.max_model_len
        self._longest = longest - _NEW_TOKENS  # prompt
        self._check_prompt = min(_CHECK_PROMPT, longest - 1)
        self._check_context = min(_CHECK_CONTEXT, longest - _CHECK_TOKENS)

    def measure(self, report: Report) -> None:
        """One pass."""
        for length in _PROMPTS:
            report(f"a prompt of {length}")
            for step in self._run(1, min(length, self._longest), 1).steps:
                self._seconds[step.shape].append(step.seconds)
        for batch, length in _DECODES:
            if not self._holds(batch, min(length, self._longest) + _NEW_TOKENS):
                continue
            report(f"decode batch {batch}, context {length}")
            steps = self._run(batch, min(length, self._longest), _NEW_TOKENS).steps
            decoding = _full_rows(steps, batch)
            self._seconds[_middle(decoding)] += [step.seconds for step in decoding]
            if (batch, length) == _MIXED:
                for step in steps:
                    if step.shape.prefill_tokens:
                        self._seconds[step.shape].append(step.seconds)
            tokens = max(self._check_prompt + 1, self._check_context + _CHECK_TOKENS)
            if (batch, length) in _CHECK_AFTER and self._holds(batch, tokens):
                report(f"check batch {batch}")
                self._check(batch)

    def _check(self, batch: int) -> None:
        """Rates at shapes that are not fitted."""
        filled = self._run(batch, self._check_prompt, 1)
        seconds = sum(step.seconds for step in filled.steps)
        self._prefill[batch].append(batch * self._check_prompt / seconds)
        steps = _full_rows(self._run(batch, self._check_context, _CHECK_TOKENS).steps, batch)
        self._decode[batch].append(batch * len(steps) / sum(step.seconds for step in steps))

    def samples(self) -> list[Sample]:
        """One for each shape, its median."""
        return [
            Sample(shape=shape, seconds=statistics.median(seconds))
            for shape, seconds in self._seconds.items()
        ]

    def checks(self, cost: StepCost) -> list[dict[str, Any]]:
        """Measured beside predicted rates, in tokens a second, on shapes that were not fitted."""
        rows = []
        for batch in sorted(self._decode):
            context = self._check_context + _CHECK_TOKENS // 2
            decode = cost.decode_tokens_per_s(batch, context)
            prefill = cost.prefill_tokens_per_s(self._check_prompt, prompts=batch)
            for kind, predicted, found in (
                ("decode", decode, self._decode[batch]),
                ("prefill", prefill, self._prefill[batch]),
            ):
                measured = statistics.median(found)
                rows.append(
                    {
                        "kind": kind,
                        "batch": batch,
                        "measured_tokens_per_s": round(measured, 1),
                        "predicted_tokens_per_s": round(predicted, 1),
                        "error": round(predicted / measured - 1, 4),
                        "samples": [round(value, 1) for value in found],
                    }
                )
        return rows

    def _holds(self, batch: int, tokens: int) -> bool:
        """Whether so many sequences of so many tokens fit the KV pool at the same time, with a block to
        spare for each."""
        found = self._engine.facts
        return batch * (-(-tokens // found.block_size) + 1) <= found.num_blocks

    def _run(self, batch: int, length: int, new_tokens: int) -> EngineRun:
        self._meter.sample()
        return self._engine.run(self._prompts.take(batch, length), new_tokens)


def _full_rows(steps: Sequence[TimedStep], batch: int) -> list[TimedStep]:
    """Steps in which all sequences decode and nothing else happens, but for the first of them."""
    found = [step for step in steps if step.shape.decode_rows == batch and not step.shape.prefill_tokens]
    return found[1:]


def _middle(steps: Sequence[TimedStep]) -> StepShape:
    """The shape in the middle, which stands for all: their contexts differ by a few tokens a row."""
    return steps[len(steps) // 2].shape


def _gpu_memory(device: str) -> int:
    """0 for a CPU."""
    return torch.cuda.mem_get_info()[1] if device == "cuda" else 0


def _pool(found: RankFacts, free_before: int) -> dict[str, int]:
    """What the engine made of the memory it found, for comparison with what is planned."""
    return {
        "free_before_bytes": free_before,
        "num_blocks": found.num_blocks,
        "block_size": found.block_size,
        "block_bytes": found.kv_bytes_per_block,
    }
