"""The engine as an order asks for it, and prompts to give it."""

from __future__ import annotations

import random

from cluster.bench.engine import BenchEngine
from cluster.bench.orders import EngineSettings
from cluster.figures.traces import FIRST_TOKEN
from workers.config import CacheConfig, GroupConfig, ModelConfig, ParallelConfig, ScheduleConfig


def open_engine(settings: EngineSettings) -> BenchEngine:
    """Loaded, without a prefix cache: every prompt is computed whole."""
    return BenchEngine(
        GroupConfig(
            model=ModelConfig(path=settings.model, dtype=settings.dtype, quantization=settings.quantization),
            cache=CacheConfig(max_bytes=settings.max_bytes, prefix_reuse=False),
            schedule=ScheduleConfig(
                max_running=settings.max_running, max_step_tokens=settings.max_step_tokens
            ),
            parallel=ParallelConfig(
                tensor_parallel=settings.tensor_parallel, threads_per_rank=settings.threads
            ),
        )
    )


class Prompts:
    """Random prompts, the same in every run of a program."""

    def __init__(self, vocab_size: int) -> None:
        self._random = random.Random(0)
        self._vocab_size = vocab_size

    def take(self, batch: int, length: int) -> list[list[int]]:
        """`batch` prompts that have nothing in common."""
        return [self._random.choices(range(FIRST_TOKEN, self._vocab_size), k=length) for _ in range(batch)]
