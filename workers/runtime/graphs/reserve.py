"""Memory that steps need beside weights and KV pool, measured before the pool is made.

Steps of all kinds are computed over a small pool, because kernels are compiled at the first step of a kind,
for seconds, which no request should wait for. The largest step that the schedule allows tells what
steps take. Then the two largest graphs are recorded, of which the second one tells what each further graph
adds. Both are dropped. What NCCL takes shows in what the device has free after that.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

import torch

from workers.config import ScheduleConfig
from workers.kernels import MAX_LOGIT_ROWS, Draw, PagedCache, StepMessage, pack_step
from workers.model.decoder import Decoder
from workers.runtime.graphs.buckets import Buckets
from workers.runtime.graphs.decoder import GraphedDecoder
from workers.runtime.graphs.device import GraphDevice

_LONG_CONTEXT = 1024  # tokens: several splits of attention (`workers.kernels.gpu.attention`)
# Both filters: the form of sampling that needs most.
_HARDEST = Draw(temperature=1.0, top_k=0, top_p=0.9, min_p=0.05, uniform=0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve:
    """Bytes of the device to leave free of KV blocks."""

    step_bytes: int
    graph_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.step_bytes + self.graph_bytes


def measure_reserve(
    decoder: Decoder,
    make_pool: Callable[[int], PagedCache],
    graph_device: GraphDevice,
    schedule: ScheduleConfig,
    *,
    block_size: int,
    max_model_len: int,
    buckets: Buckets | None,
) -> Reserve:
    """make_pool: a pool of so many blocks. buckets: of the graphs that there will be; None: there are none.
    Several ranks call this at the same time."""
    message, num_blocks = largest_step(schedule.max_step_tokens, block_size, max_model_len)
    pool = make_pool(max(num_blocks, -(-min(_LONG_CONTEXT, max_model_len) // block_size)))
    num_rows = min(MAX_LOGIT_ROWS, schedule.max_step_tokens)

    def step() -> None:
        drawn = decoder.forward(message, pool)
        if drawn is not None:
            decoder.draw(drawn.logits, drawn.hidden, [_HARDEST] * num_rows)

    # NCCL takes memory for a kind of collective at its first: of those beside the steps' own as well.
    decoder.share(torch.zeros(MAX_LOGIT_ROWS, dtype=torch.int64, device=pool.device))
    decoder.meet(pool.device)
    for num_tokens in first_steps(schedule.max_step_tokens):
        decoder.forward(largest_step(num_tokens, block_size, max_model_len)[0], pool)
    for other in other_steps(block_size, max_model_len):
        decoder.forward(other, pool)
    step()
    step_bytes = graph_device.peak_bytes(step)
    if buckets is None:
        return Reserve(step_bytes=step_bytes, graph_bytes=0)
    keys = buckets.keys()
    with closing(GraphedDecoder(decoder, pool, buckets, graph_device)) as graphs:
        taken = [graph_device.taken_bytes()]
        for key in keys[:2]:
            graphs.record([key])
            taken.append(graph_device.taken_bytes())
    first = max(0, taken[1] - taken[0])
    another = max(0, taken[-1] - taken[1])
    return Reserve(step_bytes=step_bytes, graph_bytes=first + (len(keys) - 1) * another)


def first_steps(max_step_tokens: int) -> list[int]:
    """Numbers of tokens of all kinds that kernels are compiled for: their tiles go by powers of two, and
    Triton has a form of its own for 1 and for multiples of 16."""
    powers = [1 << place for place in range(max_step_tokens.bit_length())]
    return sorted({min(power + more, max_step_tokens) for power in powers for more in (0, 1)})


def other_steps(block_size: int, max_model_len: int) -> list[StepMessage]:
    """What has kernels of its own beside prompts: a row after a long context, whose splits go through memory,
    and trees of guesses after a short and a long one. All their blocks are block 0."""
    longest = min(_LONG_CONTEXT, max_model_len)
    return [
        pack_step(
            lens=[1],
            starts=[context - 1],
            block_counts=[-(-context // block_size)],
            token_ids=[0],
            blocks=[0] * -(-context // block_size),
            logit_rows=[0],
            parents=parents,
        )
        for context, parents in ((longest, ()), (1, (-1,)), (longest, (-1,)))
    ]


def largest_step(max_step_tokens: int, block_size: int, max_model_len: int) -> tuple[StepMessage, int]:
    """Prompts that fill the budget, with as many rows of logits as a pass has, and the blocks they take."""
    lens = [max_model_len] * (max_step_tokens // max_model_len)
    if max_step_tokens % max_model_len:
        lens.append(max_step_tokens % max_model_len)
    counts = [-(-length // block_size) for length in lens]
    num_rows = min(MAX_LOGIT_ROWS, max_step_tokens)
    message = pack_step(
        lens=lens,
        starts=[0] * len(lens),
        block_counts=counts,
        token_ids=[0] * max_step_tokens,
        blocks=range(sum(counts)),
        logit_rows=range(max_step_tokens - num_rows, max_step_tokens),
    )
    return message, sum(counts)
