"""Greedy tokens equal transformers', whatever the engine does on the way.

Every core family and two with experts, on one rank and on two; prompts alone and among others; chunks of 1,
7, 16 tokens and unlimited; with and without a cached prefix; preempted in the middle. The prompts and seeds
have no near ties, so the comparison is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.models import checkpoints
from tests.models.engine_groups import BLOCK_SIZE, GREEDY
from tests.models.families import CORE
from tests.models.served import PROMPTS, Served, serve

OTHERS = [
    checkpoints.prompt_ids(length, seed=100 + length) for length in (2, 3, 5, 8, 11, 15, 18, 21, 28, 33, 39)
]
CHUNKS = (1, 7, 16, None)

# On two ranks a step costs several times more; the variants of a family differ in what a rank does alone.
ON_TWO_RANKS = ("llama", "mistral", "qwen2", "qwen3", "gpt2", "llama_head_dim_8_mqa")
WITH_EXPERTS = ("mixtral", "qwen3_moe")
GROUPS = [(entry.name, 1) for entry in CORE]
GROUPS += [(name, 2) for name in (*ON_TWO_RANKS, "qwen3_moe")] + [(name, 1) for name in WITH_EXPERTS]


@pytest.fixture(scope="module", params=GROUPS, ids=lambda pair: f"{pair[0]}-tp{pair[1]}")
def served(request: pytest.FixtureRequest, family_folder: Callable[[str], Path]) -> Iterator[Served]:
    name, tensor_parallel = request.param
    with serve(family_folder(name), tensor_parallel) as group:
        yield group


def cached_tokens(prompt: list[int]) -> int:
    """Whole blocks, and at least the last token is left to compute."""
    return (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE


@pytest.mark.parametrize("chunk", CHUNKS)
def test_alone_then_from_the_cache(served: Served, chunk: int | None) -> None:
    client = served.client(max_prefill_chunk=chunk)
    fresh = client.generate(PROMPTS, together=False)
    assert [answer.token_ids for answer in fresh] == served.expected
    assert [answer.num_cached for answer in fresh] == [0] * len(PROMPTS)
    again = client.generate(PROMPTS, together=True)
    assert [answer.token_ids for answer in again] == served.expected
    assert [answer.num_cached for answer in again] == [cached_tokens(prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("chunk", CHUNKS)
def test_among_others(served: Served, chunk: int | None) -> None:
    answers = served.client(max_prefill_chunk=chunk).generate([*OTHERS, *PROMPTS])
    assert [answer.token_ids for answer in answers[len(OTHERS) :]] == served.expected


@pytest.mark.parametrize("num_blocks", [8, 10])
@pytest.mark.parametrize("chunk", [7, None])
def test_preempted(served: Served, chunk: int | None, num_blocks: int) -> None:
    """Memory is short, three older requests go on for longer, and answers of one token are expected."""
    client = served.client(max_prefill_chunk=chunk, num_blocks=num_blocks, expected_output_tokens=1)
    for seed in (200, 201, 202):
        client.submit(checkpoints.prompt_ids(16, seed=seed), replace(GREEDY, max_tokens=36))
    ids = [client.submit(prompt) for prompt in PROMPTS]
    answers = client.finish()
    assert [answers[request_id, 0].token_ids for request_id in ids] == served.expected
    assert client.engine.stats().preemptions_total > 0


def test_small_steps(served: Served) -> None:
    """A budget below the number of running sequences and the length of the prompts."""
    answers = served.client(max_step_tokens=9).generate([*PROMPTS, *OTHERS[:3]])
    assert [answer.token_ids for answer in answers[: len(PROMPTS)]] == served.expected
