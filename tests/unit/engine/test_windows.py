"""Models whose every layer has a window: blocks that no row reads again go back, and tokens stay right."""

from __future__ import annotations

import random

import pytest

from tests.unit.engine.toy import Transcript, make_engine, make_request, numbers, reference, run
from workers.config import SpeculativeConfig

BLOCK, WINDOW = 16, 20


def visible_blocks(num_tokens: int) -> int:
    """Blocks of a sequence from the aligned group of 64 positions on in which the window of its next row
    begins."""
    first = max(0, num_tokens - WINDOW + 1) // 64 * 64
    return -(-num_tokens // BLOCK) - first // BLOCK


@pytest.mark.parametrize("prefix_reuse", [True, False])
@pytest.mark.parametrize("chunk", [7, 100, None])
def test_a_long_sequence_holds_what_its_window_holds(chunk: int | None, prefix_reuse: bool) -> None:
    engine, executor = make_engine(
        num_blocks=40, block_size=BLOCK, max_prefill_chunk=chunk, prefix_reuse=prefix_reuse, window=WINDOW
    )
    request = make_request("long", numbers(300), 200)
    engine.add(request)
    transcript, held = Transcript(), []
    while engine.has_work():
        transcript.take(engine.step())
        engine.check_integrity()
        plan = executor.plans[-1]
        computed = plan.slices[0].start + len(plan.slices[0].token_ids)
        if engine.has_work():
            assert engine.stats().active_blocks == visible_blocks(computed)
            held.append(engine.stats().active_blocks)
    assert transcript.tokens["long", 0] == reference(request, window=WINDOW)
    assert max(held[-150:]) == 6  # 64 + 20 positions at most, of 500


def test_released_blocks_are_found_again_until_they_are_evicted() -> None:
    engine, _ = make_engine(num_blocks=40, block_size=BLOCK, window=WINDOW)
    first = make_request("first", numbers(200), 100)
    again = make_request("again", numbers(200), 100)
    engine.add(first)
    engine.step()
    engine.step()
    engine.add(again)  # while the other one runs and has released most of the prompt
    transcript = run(engine)
    assert transcript.cached("again") == 192
    assert transcript.tokens["again", 0] == reference(again, window=WINDOW)
    for seed in range(1, 4):
        engine.add(make_request(f"other{seed}", numbers(250, seed), 1))
    run(engine)
    last = make_request("last", numbers(200), 30)
    engine.add(last)
    found = run(engine)
    assert found.cached("last") < 192
    assert found.tokens["last", 0] == reference(last, window=WINDOW)


def test_many_sequences_run_where_few_would_fit_whole() -> None:
    """Eight sequences of 400 tokens are 200 blocks; the pool has 64, and nobody is preempted."""
    engine, _ = make_engine(
        num_blocks=64, block_size=BLOCK, max_prefill_chunk=32, expected_output_tokens=1, window=WINDOW
    )
    requests = [make_request(f"r{seed}", numbers(40, seed), 360) for seed in range(8)]
    for request in requests:
        engine.add(request)
    transcript = run(engine)
    assert engine.stats().preemptions_total == 0
    for request in requests:
        assert transcript.tokens[request.request_id, 0] == reference(request, window=WINDOW)


@pytest.mark.parametrize("seed", range(6))
def test_random_requests_in_a_small_pool(seed: int) -> None:
    """Preempted, cached, with several choices and guesses: the tokens are those of the whole history."""
    draw = random.Random(seed)
    engine, _ = make_engine(
        num_blocks=draw.choice([14, 20]),
        block_size=BLOCK,
        max_prefill_chunk=draw.choice([5, 33, None]),
        expected_output_tokens=1,
        speculative=draw.choice([None, SpeculativeConfig(method="prompt_lookup", max_draft_tokens=3)]),
        window=WINDOW,
    )
    system = numbers(90, 9)
    requests = [
        make_request(
            f"r{index}",
            (*system[: draw.choice([0, 40, 90])], *numbers(draw.randrange(1, 60), index)),
            draw.randrange(1, 70),
            num_choices=draw.choice([1, 1, 2]),
            temperature=1.0,
            top_k=4,
        )
        for index in range(8)
    ]
    for request in requests:
        engine.add(request)
    transcript = run(engine)
    for request in requests:
        for choice in range(request.num_choices):
            wanted = reference(request, choice, window=WINDOW)
            assert transcript.tokens[request.request_id, choice] == wanted


def test_a_draft_model_keeps_the_blocks_that_it_reads() -> None:
    engine, _ = make_engine(
        num_blocks=40,
        block_size=BLOCK,
        window=WINDOW,
        speculative=SpeculativeConfig(method="draft_model", max_draft_tokens=2, model="toy"),
    )
    request = make_request("long", numbers(150), 100)
    engine.add(request)
    transcript = Transcript()
    for _ in range(20):
        transcript.take(engine.step())
    assert engine.stats().active_blocks >= 150 // BLOCK
    assert run(engine, transcript).tokens["long", 0] == reference(request, window=WINDOW)


def test_spoiled_values_are_not_found_in_what_was_released() -> None:
    engine, executor = make_engine(num_blocks=40, block_size=BLOCK, window=WINDOW, max_prefill_chunk=64)
    engine.add(make_request("bad", numbers(300), 50))
    for _ in range(10):
        engine.step()
    executor.spoil = lambda piece: "not a number"
    run(engine)
    executor.spoil = lambda piece: None
    again = make_request("again", numbers(300), 5)
    engine.add(again)
    transcript = run(engine)
    assert transcript.cached("again") == 0
    assert transcript.tokens["again", 0] == reference(again, window=WINDOW)
