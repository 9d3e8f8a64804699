"""The classic batch sweep: the same prompt and output length at growing batch sizes, against the roofline.

All prompts of a batch arrive at once. Latency is from then to a request's last token, TTFT to its first, TPOT
the mean time of a token after the first. Utilisation is what decode steps achieved: bytes that had to be read
over the read ceiling, operations over the matrix ceiling; the larger of the two is the share of the limit.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from cluster.bench.engine import EngineRun
from cluster.bench.orders import SweepOrder
from cluster.bench.report import Report
from cluster.bench.roofs import roof_meter
from cluster.bench.subject import Prompts, open_engine
from cluster.figures.percentile import percentile
from cluster.plan.devices import Roofs
from cluster.plan.roofline import Load
from workers.model.checkpoint import Checkpoint

_ROOF_SAMPLES = 3  # before each batch, a tenth of a second each


def sweep(order: SweepOrder, report: Callable[[str], None]) -> dict[str, Any]:
    """A finished report as plain data. Batches that the pool cannot hold at once still run, in turns."""
    report(f"loading {order.engine.model}")
    checkpoint = Checkpoint(order.engine.model)
    with open_engine(order.engine) as engine:
        found = engine.facts
        forms = checkpoint.forms(order.engine.quantization, found.dtype)
        load = Load.of(checkpoint.spec, dtype=found.dtype, forms=forms)
        meter = roof_meter(found.device)
        prompts = Prompts(found.limits.vocab_size)
        engine.run(prompts.take(2, 32), 4)  # memory and code are touched once, untimed
        runs: dict[int, list[EngineRun]] = {}
        for number in range(order.runs):
            for batch in order.batches:
                report(f"run {number + 1} of {order.runs}: batch {batch}")
                for _ in range(_ROOF_SAMPLES):
                    meter.sample()
                run = engine.run(prompts.take(batch, order.prompt_tokens), order.new_tokens)
                runs.setdefault(batch, []).append(run)
        meter.sample()
        roofs = meter.roofs(found.dtype)
        rows = [
            row_of(batch, runs[batch], order, load, roofs, engine.facts.num_blocks) for batch in order.batches
        ]
        mark_knee(rows)
        return Report(
            kind="sweep",
            rows=rows,
            config={
                "model": order.engine.model,
                "dtype": found.dtype,
                "quantization": order.engine.quantization,
                "device": found.device,
                "tensor_parallel": found.tensor_parallel,
                "num_blocks": found.num_blocks,
                "block_size": found.block_size,
                "max_step_tokens": order.engine.max_step_tokens,
            },
            load={
                "batches": list(order.batches),
                "prompt_tokens": order.prompt_tokens,
                "new_tokens": order.new_tokens,
                "runs": order.runs,
            },
            samples={str(batch): [_sample(run) for run in found_runs] for batch, found_runs in runs.items()},
            ceilings={
                "read_bytes_per_s": roofs.read_bytes_per_s,
                "flop_per_s": roofs.flop_per_s,
                "samples": meter.samples(),
            },
        ).content()


def row_of(
    batch: int, runs: Sequence[EngineRun], order: SweepOrder, load: Load, roofs: Roofs, num_blocks: int
) -> dict[str, Any]:
    """Figures of one batch size, medians over the runs."""
    new = order.new_tokens
    decode_s = [_decode_seconds(run, batch) for run in runs]
    context = order.prompt_tokens + new // 2
    work = load.decode(batch, context)
    step_s = statistics.median(decode_s)
    firsts = [first for run in runs for first in run.first_s]
    read_share = work.read_bytes / step_s / roofs.read_bytes_per_s if step_s else 0.0
    flop_share = work.flop / step_s / roofs.flop_per_s if step_s else 0.0
    return {
        "batch": batch,
        "latency_s": round(statistics.median(statistics.mean(run.last_s) for run in runs), 3),
        "ttft_ms": round(statistics.mean(firsts) * 1e3, 1),
        "ttft_p99_ms": round(percentile(firsts, 99) * 1e3, 1),
        "tpot_ms": round(
            statistics.median(
                statistics.mean(
                    (last - first) / max(1, new - 1)
                    for first, last in zip(run.first_s, run.last_s, strict=True)
                )
                for run in runs
            )
            * 1e3,
            2,
        ),
        "throughput_tokens_per_s": round(batch * new / statistics.median(run.seconds for run in runs), 1),
        "decode_tokens_per_s": round(batch / step_s, 1) if step_s else 0.0,
        "decode_limit_tokens_per_s": round(batch / work.seconds(roofs), 1),
        "prefill_tokens_per_s": round(statistics.median(_prefill_rate(run) for run in runs), 1),
        "kv_use": round(max(step.active_blocks for run in runs for step in run.steps) / num_blocks, 4),
        "read_share": round(read_share, 3),
        "flop_share": round(flop_share, 3),
        "limit_share": round(max(read_share, flop_share), 3),
        "bound": "bandwidth" if read_share >= flop_share else "compute",
        "is_knee": False,
    }


def mark_knee(rows: Sequence[dict[str, Any]]) -> None:
    """Marks the batch after which latency grows faster than throughput, if there is one."""
    for row, following in pairwise(rows):
        slower = following["latency_s"] / row["latency_s"]
        more = following["throughput_tokens_per_s"] / row["throughput_tokens_per_s"]
        if slower > more:
            row["is_knee"] = True
            return


def _decode_seconds(run: EngineRun, batch: int) -> float:
    """Median of a step in which all decode; of the steps with the most rows where they never all do."""
    most = max((step.shape.decode_rows for step in run.steps if not step.shape.prefill_tokens), default=0)
    rows = [
        step.seconds for step in run.steps if step.shape.decode_rows == most and not step.shape.prefill_tokens
    ]
    # A smaller batch in the pool means that the batch took so many steps more.
    return statistics.median(rows) * batch / most if rows else 0.0


def _prefill_rate(run: EngineRun) -> float:
    """Prompt tokens a second of the steps that computed prompts, decode rows in them included."""
    filling = [step for step in run.steps if step.shape.prefill_tokens]
    return sum(step.shape.prefill_tokens for step in filling) / sum(step.seconds for step in filling)


def _sample(run: EngineRun) -> dict[str, Any]:
    return {
        "seconds": run.seconds,
        "first_s": run.first_s,
        "last_s": run.last_s,
        "steps": [
            [
                step.shape.prefill_tokens,
                step.shape.decode_rows,
                step.shape.context_tokens,
                round(step.seconds, 6),
                step.active_blocks,
            ]
            for step in run.steps
        ],
    }
