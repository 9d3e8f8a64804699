"""The engine with its ranks, driven with prompts of token ids; every step is timed with what it computed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from cluster.figures.step_cost import StepShape
from cluster.figures.step_shape import shape_of
from workers.config import CacheConfig, GroupConfig
from workers.engine.engine import Engine
from workers.engine.proposals import DraftHeads, DraftModel
from workers.engine.step import Executor, GroupFailed, StepPlan, StepResult
from workers.runtime.launch import LocalGroup
from workers.runtime.rank import RankFacts
from workers.types import FinishReason, GenerateRequest, RequestId, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedStep:
    """One step of the engine, scheduling included."""

    shape: StepShape
    seconds: float
    active_blocks: int  # of the pool, held by requests after it


@dataclass(slots=True)
class EngineRun:
    """What a batch of prompts took. Seconds count from the moment all are handed over."""

    seconds: float = 0.0
    first_s: list[float] = field(default_factory=list)  # of each prompt, to its first token
    last_s: list[float] = field(default_factory=list)
    steps: list[TimedStep] = field(default_factory=list)


class BenchEngine:
    """An engine of its own on this machine. Use as a context: it has the memory and the rank processes."""

    def __init__(self, config: GroupConfig) -> None:
        """Loads; raises what `workers.runtime.rank.Leader` raises."""
        self._group = LocalGroup(config)
        self._recorder = _Recorder(self._group.executor)
        self._config = config
        self._num_requests = 0
        self._engine = self._fresh(config.cache.prefix_reuse)

    @property
    def facts(self) -> RankFacts:
        return self._group.facts

    def run(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> EngineRun:
        """Continues all prompts greedily by exactly `new_tokens`, whatever end ids come.

        Raises GroupFailed when a rank or a request fails.
        """
        numbers = {}
        started = time.perf_counter()
        for place, prompt in enumerate(prompts):
            self._num_requests += 1
            request_id = RequestId(f"bench-{self._num_requests}")
            numbers[request_id] = place
            sampling = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
            self._engine.add(
                GenerateRequest(request_id=request_id, prompt_token_ids=tuple(prompt), sampling=sampling)
            )
        run = EngineRun(first_s=[0.0] * len(prompts), last_s=[0.0] * len(prompts))
        timed: list[tuple[StepPlan | None, float, int]] = []
        tokens = 0
        before = started
        while self._engine.has_work():
            self._recorder.plan = None
            chunks = self._engine.step()
            now = time.perf_counter()
            timed.append((self._recorder.plan, now - before, self._engine.num_active_blocks))
            for chunk in chunks:
                if chunk.finish_reason is FinishReason.ERROR:
                    raise GroupFailed(f"a request failed while measuring: {chunk.error}")
                place = numbers[chunk.request_id]
                run.first_s[place] = run.first_s[place] or now - started
                run.last_s[place] = now - started
                tokens += len(chunk.token_ids)
            before = time.perf_counter()
        run.seconds = time.perf_counter() - started
        assert tokens == new_tokens * len(prompts), (tokens, new_tokens, len(prompts))
        run.steps = [
            TimedStep(shape=shape_of(plan), seconds=seconds, active_blocks=blocks)
            for plan, seconds, blocks in timed
            if plan is not None
        ]
        return run

    def close(self) -> None:
        """Ends the ranks. May be called twice."""
        self._group.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _fresh(self, prefix_reuse: bool) -> Engine:
        facts = self._group.facts
        return Engine(
            limits=facts.limits,
            cache=CacheConfig(block_size=facts.block_size, prefix_reuse=prefix_reuse),
            schedule=self._config.schedule,
            executor=self._recorder,
        )


class _Recorder:
    """An executor that remembers the plan it ran last."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.plan: StepPlan | None = None

    @property
    def num_blocks(self) -> int:
        return self._executor.num_blocks

    @property
    def draft_model(self) -> DraftModel | None:
        return self._executor.draft_model

    @property
    def draft_heads(self) -> DraftHeads | None:
        return self._executor.draft_heads

    def execute(self, plan: StepPlan) -> StepResult:
        self.plan = plan
        return self._executor.execute(plan)

    def close(self) -> None:
        self._executor.close()
