"""Decode and prefill against what the card can do, measured in the same run, and against transformers."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import quantiles

import torch

from benchmarks.gpu_check.driver import Driver, prompts_of
from benchmarks.gpu_check.findings import figure, target
from benchmarks.gpu_check.rival import Rival
from benchmarks.gpu_check.settings import Settings
from workers.engine.work import ModelWork
from workers.model.checkpoint import Checkpoint
from workers.runtime.model_work import model_work
from workers.weight_forms import WeightForms

_LEAST_SHARE = {1: 0.8, 32: 0.8, 128: 0.7}  # of the roof, by batch
_LEAST_PREFILL = {2048: 0.6}  # of the matrix rate, by tokens
_MOST_JITTER, _MOST_IDLE, _LEAST_RATIO = 1.1, 0.05, {32: 3.0}


class Roofs:
    """What the card does at most: bytes copied, read and written, and floating-point operations a second."""

    def __init__(self, settings: Settings) -> None:
        size, side = (1 << 24, 256) if settings.is_dry else (4 << 30, 8192)
        device, dtype = settings.device, getattr(torch, settings.dtype)
        source = torch.zeros(size, dtype=torch.uint8, device=device)
        target_bytes = torch.empty_like(source)
        left = torch.randn(side, side, device=device).to(dtype)
        out = torch.empty_like(left)
        self.bytes_per_s = 2 * size / _best_s(lambda: target_bytes.copy_(source), device)
        self.flop_per_s = 2 * side**3 / _best_s(lambda: torch.mm(left, left, out=out), device)


def measure_speed(folder: str, driver: Driver, rival: Rival, settings: Settings) -> None:
    """Says a figure for each point, and which targets are missed."""
    roofs = Roofs(settings)
    figure("roofs", gb_per_s=roofs.bytes_per_s / 1e9, tflop_per_s=roofs.flop_per_s / 1e12)
    facts = driver.group.facts
    work = model_work(
        Checkpoint(folder).spec,
        getattr(torch, settings.dtype),
        WeightForms(),
        kv_bytes_per_token=facts.kv_bytes_per_block // facts.block_size,
    )
    for batch in settings.batches:
        _decode(batch, driver, rival, work, roofs, settings)
    for length in settings.prefills:
        _prefill(length, driver, work, roofs)
    if not settings.is_dry:
        prompts = prompts_of(32, settings.decode_prompt, facts.limits.vocab_size)
        idle = driver.idle_share(prompts, 24)
        figure("decode b32: device", idle_share=idle)
        target("device idle in decode", idle <= _MOST_IDLE, f"{idle:.1%}, at most {_MOST_IDLE:.0%}")


def _decode(
    batch: int, driver: Driver, rival: Rival, work: ModelWork, roofs: Roofs, settings: Settings
) -> None:
    name, tokens = f"decode b{batch}", settings.decode_tokens
    prompts = prompts_of(batch, settings.decode_prompt, driver.group.facts.limits.vocab_size)
    driver.run(prompts, 4)  # libraries and kernels that are made on first use
    steps = driver.run(prompts, tokens).decode_s
    mean_s = sum(steps) / len(steps)
    context = settings.decode_prompt + tokens / 2
    read_bytes = work.weight_bytes + batch * context * work.kv_bytes_per_token
    flop = batch * (2.0 * (work.linear_weights + work.head_weights) + 4.0 * work.attention_width * context)
    share = max(read_bytes / roofs.bytes_per_s, flop / roofs.flop_per_s) / mean_s
    cuts = quantiles(steps, n=100) if len(steps) > 1 else steps * 99
    jitter = cuts[98] / cuts[49]
    values = {
        "tokens_per_s": batch / mean_s,
        "step_ms": 1e3 * mean_s,
        "p50_ms": 1e3 * cuts[49],
        "p99_ms": 1e3 * cuts[98],
        "share_of_roof": share,
    }
    if batch in settings.rival_batches:
        theirs = rival.decode_tokens_per_s(prompts, settings.rival_tokens)
        values |= {"transformers": theirs, "ratio": batch / mean_s / theirs}
    figure(name, **values)
    if settings.is_dry:
        return
    if batch in _LEAST_SHARE:
        target(f"{name}: share of the roof", share >= _LEAST_SHARE[batch], f"{share:.2f}")
    if batch in _LEAST_RATIO:
        least = _LEAST_RATIO[batch]
        target(f"{name}: against transformers", values["ratio"] >= least, f"{values['ratio']:.2f}")
    target(f"{name}: p99 / p50", jitter <= _MOST_JITTER, f"{jitter:.3f}")


def _prefill(length: int, driver: Driver, work: ModelWork, roofs: Roofs) -> None:
    vocab_size = driver.group.facts.limits.vocab_size
    prompts = prompts_of(4, length, vocab_size)
    first_s = min(driver.run([prompt], 1).answers[0].first_s for prompt in prompts)
    flop = 2.0 * (work.linear_weights * length + work.head_weights)
    flop += 4.0 * work.attention_width * length * (length + 1) / 2
    share = flop / first_s / roofs.flop_per_s
    figure(f"prefill {length}", tokens_per_s=length / first_s, ms=1e3 * first_s, share_of_matrix_rate=share)
    if length in _LEAST_PREFILL:
        target(f"prefill {length}: share", share >= _LEAST_PREFILL[length], f"{share:.2f}")


def _best_s(work: Callable[[], object], device: str) -> float:
    best = float("inf")
    for _ in range(6):
        started = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return best
