"""Engines over real ranks: one group of processes serves many engines, each with a cache of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from workers.config import (
    CacheConfig,
    GroupConfig,
    ModelConfig,
    ParallelConfig,
    ScheduleConfig,
    SpeculativeConfig,
)
from workers.engine.engine import Engine
from workers.engine.proposals import DraftHeads, DraftModel, DraftTask, HeadTask, Proposals
from workers.engine.step import Executor, StepPlan, StepResult, StepStarter
from workers.runtime.launch import LocalGroup
from workers.runtime.rank import RankFacts
from workers.types import (
    BeamParams,
    BegunChoice,
    FinishReason,
    GenerateRequest,
    RequestId,
    SamplingParams,
    TokenChunk,
    TokenLogprob,
)

BLOCK_SIZE = 16
UNLIMITED = 4096  # tokens in a step
GREEDY = SamplingParams(max_tokens=20, temperature=0.0)


def group_config(
    folder: Path,
    tensor_parallel: int,
    *,
    step_timeout_s: float = 20.0,
    dtype: str = "float32",
    kv_dtype: str = "auto",
    quantization: str = "auto",
    speculative: SpeculativeConfig | None = None,
    **cache: int,
) -> GroupConfig:
    return GroupConfig(
        model=ModelConfig(path=str(folder), dtype=dtype, quantization=quantization),
        speculative=speculative or SpeculativeConfig(),
        cache=CacheConfig(block_size=BLOCK_SIZE, dtype=kv_dtype, **({"num_blocks": 160} | cache)),
        parallel=ParallelConfig(
            tensor_parallel=tensor_parallel, threads_per_rank=1, step_timeout_s=step_timeout_s, device="cpu"
        ),
    )


def start_group(folder: Path, tensor_parallel: int, **options: float | str | SpeculativeConfig) -> LocalGroup:
    """A group whose failures are raised by its executor and nowhere else."""
    config = group_config(folder, tensor_parallel, **options)  # type: ignore[arg-type]
    return LocalGroup(config, on_failure=lambda reason: None)


class FewerBlocks:
    """An executor of which only some blocks are used, to make memory short."""

    def __init__(self, executor: Executor, num_blocks: int) -> None:
        self._executor = executor
        self.num_blocks = num_blocks
        self.draft_model = executor.draft_model
        self.draft_heads = executor.draft_heads

    def execute(self, plan: StepPlan) -> StepResult:
        return self._executor.execute(plan)

    def close(self) -> None:
        self._executor.close()


class InNoTime:
    """An executor whose guesses take no time, so that as many are made as are allowed, on any machine; with
    an engine whose clock stands still."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.num_blocks = executor.num_blocks
        self.draft_model = executor.draft_model and _QuickModel(executor.draft_model)
        self.draft_heads = executor.draft_heads and _QuickHeads(executor.draft_heads)

    def execute(self, plan: StepPlan) -> StepResult:
        return self._executor.execute(plan)

    def close(self) -> None:
        self._executor.close()


class _QuickModel:
    def __init__(self, model: DraftModel) -> None:
        self._model = model
        self.max_tokens = model.max_tokens

    def propose(self, tasks: Sequence[DraftTask]) -> Proposals:
        return self._model.propose(tasks)._replace(passes=())


class _QuickHeads:
    def __init__(self, heads: DraftHeads) -> None:
        self._heads = heads
        self.num_heads = heads.num_heads

    def propose(self, step_number: int, tasks: Sequence[HeadTask]) -> Proposals:
        return self._heads.propose(step_number, tasks)._replace(passes=())


@dataclass
class Answer:
    """All that came for one choice."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    num_cached: int = 0
    finish: FinishReason | None = None
    score: float | None = None
    chunk_with_error: TokenChunk | None = None


class Client:
    """An engine with a fresh cache, and requests run to their end."""

    def __init__(
        self,
        facts: RankFacts,
        executor: Executor,
        *,
        num_blocks: int | None = None,
        prefix_reuse: bool = True,
        speculative: SpeculativeConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
        starter: StepStarter | None = None,
        **schedule: int | None,
    ) -> None:
        self.engine = Engine(
            limits=facts.limits,
            cache=CacheConfig(block_size=facts.block_size, prefix_reuse=prefix_reuse),
            schedule=replace(ScheduleConfig(max_step_tokens=UNLIMITED), **schedule),
            speculative=speculative,
            clock=clock,
            executor=executor if num_blocks is None else FewerBlocks(executor, num_blocks),
            starter=starter,
        )
        self._number = 0

    def submit(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams = GREEDY,
        *,
        num_choices: int = 1,
        beam: BeamParams | None = None,
        salt: str = "",
        begun: tuple[BegunChoice, ...] = (),
    ) -> RequestId:
        self._number += 1
        request_id = RequestId(f"request-{self._number}")
        self.engine.add(
            GenerateRequest(
                request_id=request_id,
                prompt_token_ids=tuple(prompt),
                sampling=sampling,
                num_choices=num_choices,
                beam=beam,
                cache_salt=salt,
                begun=begun,
            )
        )
        return request_id

    def finish(self) -> dict[tuple[RequestId, int], Answer]:
        """Runs all submitted requests to their end; checks that nothing is left behind."""
        answers: dict[tuple[RequestId, int], Answer] = {}
        while self.engine.has_work():
            for chunk in self.engine.step():
                collect(answers.setdefault((chunk.request_id, chunk.choice), Answer()), chunk)
            self.engine.check_integrity()
        assert self.engine.stats().active_blocks == 0
        assert all(answer.finish is not None for answer in answers.values())
        return answers

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams = GREEDY, *, together: bool = True
    ) -> list[Answer]:
        """One answer per prompt, all at once or one after the other."""
        if together:
            ids = [self.submit(prompt, sampling) for prompt in prompts]
            answers = self.finish()
            return [answers[request_id, 0] for request_id in ids]
        return [self.generate([prompt], sampling)[0] for prompt in prompts]


def collect(answer: Answer, chunk: TokenChunk) -> None:
    """Adds what a chunk says."""
    assert answer.finish is None, "a chunk after the end"
    answer.token_ids += chunk.token_ids
    answer.logprobs += chunk.logprobs or ()
    answer.num_cached = max(answer.num_cached, chunk.num_cached_tokens)
    answer.finish, answer.score = chunk.finish_reason, chunk.score
    if chunk.prompt_logprobs is not None:
        answer.prompt_logprobs = chunk.prompt_logprobs
    if chunk.error is not None:
        answer.chunk_with_error = chunk
