"""The same request gives the same tokens however it is chunked, cached, batched or preempted."""

from __future__ import annotations

import random

import pytest

from tests.unit.engine.toy import Transcript, make_engine, make_request, numbers, reference, run
from workers.types import GenerateRequest

CHUNKS = [1, 7, 16, 100_000]


def _family() -> list[GenerateRequest]:
    """Prompts of many lengths, some with a common beginning, some with several choices."""
    system = numbers(37, 9)
    return [
        make_request("p8", numbers(10, 5), 70),
        make_request("p9", numbers(12, 6), 70),
        make_request("p0", numbers(1, 1), 9),
        make_request("p1", numbers(16, 2), 20),
        make_request("p2", (*system, *numbers(5, 3)), 12, num_logprobs=0),
        make_request("p3", (*system, *numbers(11, 4)), 12, temperature=1.0, num_choices=3),
        make_request("p4", system, 17, min_tokens=3, stop_token_ids=(5, 6, 7, 8, 9)),
        make_request("p5", numbers(64, 5), 16, num_prompt_logprobs=2),
        make_request("p6", system, 17, ignore_eos=True),
        make_request("p7", numbers(33, 6), 0, num_prompt_logprobs=0),
    ]


def _check(transcript: Transcript, requests: list[GenerateRequest]) -> None:
    for request in requests:
        for choice in range(request.num_choices):
            assert transcript.tokens[request.request_id, choice] == reference(request, choice, (1, 2))


@pytest.mark.parametrize("prefix_reuse", [True, False])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_chunks_alone_and_together(chunk: int, prefix_reuse: bool) -> None:
    requests = _family()
    engine, _ = make_engine(
        num_blocks=200,
        max_prefill_chunk=chunk,
        max_step_tokens=max(64, chunk),
        prefix_reuse=prefix_reuse,
        eos=(1, 2),
    )
    alone = Transcript()
    for request in requests:
        engine.add(request)
        run(engine, alone)
    _check(alone, requests)
    engine, _ = make_engine(
        num_blocks=200,
        max_step_tokens=max(chunk, 12),
        max_prefill_chunk=chunk,
        prefix_reuse=prefix_reuse,
        eos=(1, 2),
    )
    for request in requests:
        engine.add(request)
    together = run(engine)
    assert together.tokens == alone.tokens


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_forced_preemption(chunk: int, block_size: int) -> None:
    requests = _family()
    num_blocks = -(-85 // block_size) + 2  # little more than the largest needs
    engine, _ = make_engine(
        num_blocks=num_blocks,
        block_size=block_size,
        max_prefill_chunk=chunk,
        expected_output_tokens=1,
        eos=(1, 2),
    )
    for request in requests:
        engine.add(request)
    _check(run(engine), requests)
    assert engine.stats().preemptions_total > 0


def test_random_arrivals_in_small_pools_all_end_with_the_right_tokens() -> None:
    preemptions = 0
    for seed in range(60):
        draw = random.Random(seed)
        block_size, num_blocks = draw.choice([1, 2, 4]), draw.randint(4, 32)
        engine, _ = make_engine(
            num_blocks=num_blocks,
            block_size=block_size,
            max_step_tokens=draw.choice([2, 7, 64]),
            max_running=draw.choice([2, 128]),
            prefix_reuse=draw.random() < 0.8,
            expected_output_tokens=1,
            eos=(3,),
        )
        requests, transcript = [], Transcript()
        for index in range(draw.randint(2, 8)):
            most = num_blocks * block_size
            length = draw.randint(1, max(1, most * 2 // 3))
            request = make_request(
                str(index),
                numbers(length, draw.randint(0, 1)),
                draw.randint(1, most - length + 1),
                num_choices=draw.choice([1, 1, 3]),
                priority=draw.choice([0, 0, 1]),
            )
            engine.add(request)
            requests.append(request)
            for _ in range(draw.randint(0, 4)):
                transcript.take(engine.step())
        run(engine, transcript)
        for request in requests:
            for choice in range(request.num_choices):
                assert transcript.tokens[request.request_id, choice] == reference(request, choice, (3,))
        preemptions += engine.stats().preemptions_total
    assert preemptions > 20
