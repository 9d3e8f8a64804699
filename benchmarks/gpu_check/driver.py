"""The engine over a group of its own, driven with token ids; every step is timed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import torch
from torch._C._autograd import DeviceType

from benchmarks.gpu_check.settings import Settings
from workers.config import CacheConfig, GroupConfig, ModelConfig, ParallelConfig, ScheduleConfig
from workers.engine.engine import Engine
from workers.engine.step import GroupFailed
from workers.runtime.launch import LocalGroup
from workers.types import FinishReason, GenerateRequest, RequestId, SamplingParams

Prompt = Sequence[int]


def prompts_of(count: int, num_tokens: int, vocab_size: int) -> list[list[int]]:
    """All different from their first token on."""
    return [
        [(number * 7919 + place * 31 + 5) % vocab_size for place in range(num_tokens)]
        for number in range(count)
    ]


def config_of(
    settings: Settings,
    folder: str,
    *,
    cuda_graphs: bool = True,
    symmetric_memory: bool = True,
    tensor_parallel: int = 1,
    num_blocks: int | None = None,
) -> GroupConfig:
    """num_blocks: of the pool; None: from free memory."""
    return GroupConfig(
        model=ModelConfig(path=folder, dtype=settings.dtype),
        cache=CacheConfig(num_blocks=num_blocks, memory_fraction=0.75, max_bytes=1 << 26),
        schedule=ScheduleConfig(
            max_step_tokens=settings.max_step_tokens,
            max_running=max(settings.batches),
            plan_ahead=True if settings.is_dry else None,
        ),
        parallel=ParallelConfig(
            tensor_parallel=tensor_parallel,
            device=settings.device,
            cuda_graphs=cuda_graphs,
            symmetric_memory=symmetric_memory,
            step_timeout_s=settings.step_timeout_s,
            threads_per_rank=1 if settings.is_dry else None,
        ),
    )


@dataclass(slots=True)
class Answer:
    """Of one prompt."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    first_s: float = 0.0


@dataclass(slots=True)
class Run:
    """Of a batch. Seconds of the steps that gave each sequence its next token, after all had one."""

    answers: list[Answer]
    decode_s: list[float] = field(default_factory=list)


def _go_on(_reason: str) -> None:
    """In place of the end of this process: the step raises, with the reason."""


class Driver:
    """A context: it has the memory and the rank processes."""

    def __init__(self, config: GroupConfig) -> None:
        self._config = config
        self.group = LocalGroup(config, on_failure=_go_on)

    def run(self, prompts: Sequence[Prompt], new_tokens: int, params: SamplingParams | None = None) -> Run:
        """Continues all by exactly so many tokens, greedily unless params say otherwise. Nothing is kept
        from one run to the next. Raises GroupFailed."""
        engine = self._engine(prompts, new_tokens, params)
        run = Run([Answer() for _ in prompts])
        started = before = time.perf_counter()
        num_begun = 0
        while engine.has_work():
            is_decode = num_begun == len(prompts)
            chunks = engine.step()
            now = time.perf_counter()
            if is_decode:
                run.decode_s.append(now - before)
            before = now
            for chunk in chunks:
                if chunk.finish_reason is FinishReason.ERROR:
                    raise GroupFailed(chunk.error or "a request ended in an error")
                answer = run.answers[int(chunk.request_id)]
                if not answer.token_ids:
                    answer.first_s = now - started
                    num_begun += 1
                answer.token_ids += chunk.token_ids
                answer.logprobs += [found.logprob for found in chunk.logprobs or ()]
        return run

    def idle_share(self, prompts: Sequence[Prompt], num_steps: int) -> float:
        """Share of the time of decode steps in which the GPU has nothing to do, by torch's profiler."""
        engine = self._engine(prompts, 2 * num_steps + 8, None)
        for _ in range(num_steps):  # prompts, and the first steps
            engine.step()
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            began = time.perf_counter()
            for _ in range(num_steps):
                engine.step()
            seconds = time.perf_counter() - began
        busy_us = sum(
            event.time_range.elapsed_us()
            for event in profile.events() or ()
            if event.device_type == DeviceType.CUDA
        )
        return max(0.0, 1.0 - float(busy_us) / 1e6 / seconds)

    def close(self) -> None:
        self.group.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _engine(self, prompts: Sequence[Prompt], new_tokens: int, params: SamplingParams | None) -> Engine:
        facts = self.group.facts
        engine = Engine(
            limits=facts.limits,
            cache=CacheConfig(block_size=facts.block_size, prefix_reuse=False),
            schedule=self._config.schedule,
            executor=self.group.executor,
            starter=self.group.starter,
        )
        params = params or SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        for number, prompt in enumerate(prompts):
            engine.add(
                GenerateRequest(
                    request_id=RequestId(str(number)), prompt_token_ids=tuple(prompt), sampling=params
                )
            )
        return engine
