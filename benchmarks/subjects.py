"""What is measured: our engine, and transformers' generate. Both take token ids and tell seconds."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

from cluster.bench.engine import BenchEngine
from workers.config import CacheConfig, GroupConfig, ModelConfig, ParallelConfig, ScheduleConfig

Prompts = Sequence[Sequence[int]]
_CACHE_BYTES = 3 << 30  # no work may preempt: 128 sequences of 576 tokens of SmolLM2 take 1.7 GB


class SubjectFailed(RuntimeError):
    """A subject cannot go on; the others can. The text says which and why."""


class Subject(Protocol):
    """Something that continues prompts greedily, never stopping at an end token."""

    def generate(self, prompts: Prompts, new_tokens: int) -> float:
        """Seconds until every prompt has its `new_tokens`."""
        ...

    def after_beginning(self, beginning: Sequence[int], prompt: Sequence[int]) -> float:
        """Seconds to the first token of `prompt` when `beginning`, its start, has been computed before."""
        ...

    def close(self) -> None:
        """Ends what it started."""
        ...


class Tandem:
    """Our engine with its executor, in this process, as a group of one rank runs it."""

    def __init__(self, folder: Path, threads: int, max_running: int, quantization: str = "none") -> None:
        config = GroupConfig(
            model=ModelConfig(path=str(folder), dtype="bfloat16", quantization=quantization),
            cache=CacheConfig(max_bytes=_CACHE_BYTES),
            schedule=ScheduleConfig(max_running=max_running),
            parallel=ParallelConfig(device="cpu", threads_per_rank=threads),
        )
        self._engine = BenchEngine(config)

    def generate(self, prompts: Prompts, new_tokens: int) -> float:
        return self._engine.run(prompts, new_tokens).seconds

    def after_beginning(self, beginning: Sequence[int], prompt: Sequence[int]) -> float:
        self.generate([beginning], 1)
        return self.generate([prompt], 1)

    def close(self) -> None:
        self._engine.close()


class Transformers:
    """transformers' generate, in one of its cache implementations, eager: compiling would take minutes."""

    def __init__(self, folder: Path, cache: str) -> None:
        """cache: `dynamic` (its default) or `static`."""
        logging.getLogger("transformers").setLevel(logging.ERROR)
        # The loaders and generate() are untyped for checkers; everything that leaves this class is a float.
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, trust_remote_code=False
        )
        self._is_static = cache == "static"

    def generate(self, prompts: Prompts, new_tokens: int) -> float:
        ids = torch.tensor(prompts, dtype=torch.int64)
        return self._timed(ids, new_tokens, {"cache_implementation": "static"} if self._is_static else {})

    def after_beginning(self, beginning: Sequence[int], prompt: Sequence[int]) -> float:
        """Its documented prefix reuse: a cache filled with the beginning, outside of the timed part."""
        config = self._model.config
        cache = (
            StaticCache(config=config, max_cache_len=len(prompt) + 1)
            if self._is_static
            else DynamicCache(config=config)
        )
        with torch.no_grad():
            self._model(torch.tensor([beginning]), cache=cache)
        return self._timed(torch.tensor([prompt]), 1, {"cache": cache})

    def _timed(self, ids: torch.Tensor, new_tokens: int, options: dict[str, object]) -> float:
        options = {
            "attention_mask": torch.ones_like(ids),
            "max_new_tokens": new_tokens,
            "min_new_tokens": new_tokens,
            "do_sample": False,
            "disable_compile": True,
            **options,
        }
        started = time.perf_counter()
        found = self._model.generate(ids, **options)
        seconds = time.perf_counter() - started
        assert found.shape == (ids.shape[0], ids.shape[1] + new_tokens), found.shape
        return seconds

    def close(self) -> None:
        """Nothing to end: the model is memory of this process."""
