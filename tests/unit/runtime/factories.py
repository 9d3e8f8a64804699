"""Short makers of what the runtime takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from workers.engine.step import Sampled, SampleTask, SequenceSlice
from workers.kernels import kernels_for
from workers.runtime import sampler
from workers.types import SamplingParams

GREEDY = SamplingParams(max_tokens=64, temperature=0.0)
RANDOM = SamplingParams(max_tokens=64, temperature=1.0)


def task(
    params: SamplingParams = GREEDY,
    *,
    prompt: Sequence[int] = (1, 2, 3),
    output: Sequence[int] = (),
    choice: int = 0,
    forbidden: Sequence[int] = (),
    **changes: object,
) -> SampleTask:
    """A sample task; `changes` replaces fields of `params`."""
    return SampleTask(
        params=replace(params, min_tokens=len(output) + 1 if forbidden else 0, **changes),
        choice=choice,
        prompt_token_ids=prompt,
        output_token_ids=output,
        end_token_ids=forbidden,
    )


def piece(
    token_ids: Sequence[int],
    *,
    start: int = 0,
    blocks: Sequence[int],
    sample: SampleTask | None = None,
    targets: Sequence[int] | None = None,
    num_top: int = 0,
) -> SequenceSlice:
    return SequenceSlice(
        token_ids=token_ids,
        start=start,
        block_table=blocks,
        sample=sample,
        prompt_targets=targets,
        num_prompt_logprobs=num_top,
    )


def sample(logits: torch.Tensor, tasks: Sequence[SampleTask]) -> list[Sampled | None]:
    """The sampler over the kernels of this machine."""
    kernels = kernels_for(torch.device("cpu"), torch.float32)
    drawn = kernels.draw(logits, [sampler.draw_of(each) for each in tasks], only_finite=True)
    return sampler.sample(logits, drawn, tasks, kernels)
