"""Small traces and costs."""

from __future__ import annotations

import random

from cluster.figures.step_cost import StepCost
from cluster.figures.traces import TraceRequest

TOKENS_PER_ID = 32

# One millisecond a step and a prompt token, half a row, nothing for what is read: times can be worked out.
PLAIN = StepCost(
    overhead_s=0.001,
    weights_s=0.0,
    token_s=0.001,
    row_s=0.0005,
    context_token_s=0.0,
    pair_s=0.0,
    blend=1.0,
)
# Terms that leave no two steps equally long.
UNEVEN = StepCost(
    overhead_s=0.0007,
    weights_s=0.0041,
    token_s=0.00031,
    row_s=0.00017,
    context_token_s=3.1e-7,
    pair_s=1.7e-7,
    blend=2.0,
)


def conversations(
    num: int, *, turns: int = 3, rate: float = 4.0, seed: int = 0, output: int = 60
) -> list[TraceRequest]:
    """Turns that begin with all that was said before, and one system prompt for all."""
    draw = random.Random(seed)
    ids = iter(range(1, 1_000_000))
    found: list[tuple[float, int, tuple[int, ...], int]] = []
    for _ in range(num):
        start_s = draw.uniform(0.0, num / rate)
        said: tuple[int, ...] = (0,)
        for _ in range(turns):
            said = (*said, *(next(ids) for _ in range(draw.randint(1, 8))))
            cut = draw.randrange(TOKENS_PER_ID)  # the last id stands for a shorter run
            tokens = len(said) * TOKENS_PER_ID - cut
            found.append((start_s, tokens, said, draw.randint(1, output)))
            start_s += draw.uniform(0.5, 5.0)
    found.sort()
    return [
        TraceRequest(
            number=number,
            arrival_s=arrival_s,
            prompt_tokens=tokens,
            output_tokens=answer,
            prefix_ids=said,
            tokens_per_id=TOKENS_PER_ID,
        )
        for number, (arrival_s, tokens, said, answer) in enumerate(found)
    ]
