"""A model whose every layer has a window, in the engine: it says what transformers says while its first
blocks have been given back, and given to others. Kernels do not look at them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.models import checkpoints
from tests.models.engine_groups import BLOCK_SIZE, GREEDY, Client, start_group
from tests.models.oracle import Oracle
from tests.unit.kernels.batches import make_pool
from workers.kernels import Kernels, TorchKernels, kernels_for
from workers.kernels.batch import StepBatch

WINDOW, NUM_TOKENS = 16, 60
PROMPT = checkpoints.prompt_ids(100, seed=100)


def test_tokens_and_blocks_of_a_long_answer(tmp_path: Path) -> None:
    family = checkpoints.family("mistral")
    folder = checkpoints.build(tmp_path / "m", family, seed=9, num_hidden_layers=1)
    wanted = Oracle(folder).greedy(PROMPT, NUM_TOKENS)
    params = replace(GREEDY, max_tokens=NUM_TOKENS)
    with start_group(folder, 1) as group:
        client = Client(group.facts, group.executor, num_blocks=11, max_prefill_chunk=32)
        client.submit(PROMPT, params)
        held = []
        while client.engine.has_work():
            client.engine.step()
            held.append(client.engine.stats().active_blocks)
        # 160 tokens are 10 blocks; at the end the window begins in the third group of 64 positions.
        assert max(held) == 5 and held[-2] == 10 - 2 * 64 // BLOCK_SIZE
        for others in (1, 8):
            client = Client(group.facts, group.executor, num_blocks=24, max_prefill_chunk=32)
            prompts = [PROMPT, *(checkpoints.prompt_ids(70, seed=s) for s in range(1, others))]
            answers = client.generate(prompts, params)
            assert answers[0].token_ids == wanted
            again = client.generate([PROMPT], params)[0]  # from what of it can still be found
            assert again.token_ids == wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("context", [80, 81, 143, 144, 200])
def test_kernels_do_not_read_what_lies_before_the_window(context: int, dtype: torch.dtype) -> None:
    """Blocks in front of the group of 64 positions in which the window begins hold NaN."""
    generator = torch.Generator().manual_seed(context)
    num_blocks = -(-context // BLOCK_SIZE)
    pool = make_pool(num_blocks, 2, BLOCK_SIZE, 32, dtype)
    batch = _last_row(context, range(num_blocks))
    q = torch.randn(1, 4, 32, generator=generator).to(dtype)
    kernels: Sequence[Kernels] = (TorchKernels(), kernels_for(torch.device("cpu"), dtype))
    wanted = [each.paged_attention(q, pool.layers[1], batch, 0.2, WINDOW) for each in kernels]
    first_seen = (context - WINDOW) // 64 * 64
    pool.numbers[: first_seen // BLOCK_SIZE] = float("nan")
    for each, values in zip(kernels, wanted, strict=True):
        assert torch.equal(each.paged_attention(q, pool.layers[1], batch, 0.2, WINDOW), values)


def _last_row(context: int, blocks: Sequence[int]) -> StepBatch:
    return StepBatch(
        token_ids=torch.zeros(1, dtype=torch.int64),
        positions=torch.tensor([context - 1]),
        slots=torch.tensor([context - 1]),
        query_starts=torch.tensor([0, 1], dtype=torch.int32),
        context_lens=torch.tensor([context], dtype=torch.int32),
        block_tables=torch.tensor([list(blocks)], dtype=torch.int32),
        logit_rows=torch.zeros(1, dtype=torch.int64),
        max_context_len=context,
    )
