"""A prompt that is read from another group gives what a computed one gives, for one step of the tail."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.engine.toy import make_engine, make_request, numbers, reference, run
from tests.unit.exchange.world import Group, Options, World
from workers.engine.exchange import Offered, OpenLease, Pulled
from workers.types import GenerateRequest, RequestId

TRANSFER = "0f" * 16


def _pair(**options: int) -> tuple[World, Group, Group]:
    world = World()
    return world, world.start("P", Options(**options)), world.start("D", Options(**options))


def test_blocks_are_read_while_the_source_computes_them() -> None:
    world, prefill, decode = _pair(max_step_tokens=8)
    request = make_request("r", numbers(23), 6)
    decode.submit(replace(request, kv_source=world.source("P", TRANSFER)))
    prefill.submit(replace(make_request("p", numbers(23), 0), transfer_id=TRANSFER))
    assert not decode.step()  # waits
    assert world.deliver_all(OpenLease) == 1
    seen = []
    for _ in range(3):
        assert prefill.step()
        offered = world.deliver()
        assert isinstance(offered, Offered)
        seen.append((len(offered.offers), offered.is_complete))
        world.copy_all()
        world.deliver_all(Pulled)
        world.check()
    assert seen == [(2, False), (2, False), (1, True)]
    assert prefill.stats_held == 5
    world.deliver_all()
    assert prefill.stats_held == 0
    assert decode.step()
    assert decode.memory.num_computed_tokens == 3  # the tail of 23 tokens
    world.settle()
    world.assert_rest()
    assert decode.transcript.tokens["r", 0] == reference(request)
    assert decode.transcript.cached("r") == 20
    stats = decode.engine.stats()
    assert (stats.kv_fetches_total, stats.kv_fetched_tokens_total) == (1, 20)


def test_a_block_of_a_failed_pull_is_not_zeroed_while_the_next_pull_writes_it() -> None:
    """A pull does not wait for the step in flight, which was planned ahead."""
    world = World(plans_ahead=True)
    prefill, decode = world.start("P"), world.start("D")
    decode.submit(make_request("busy", numbers(5, 3), 20))
    assert decode.step()  # from now on a step is in flight
    for seed, name in enumerate(("lost", "kept")):
        prompt, transfer_id = numbers(23, seed), f"{seed:032x}"
        prefill.submit(replace(make_request(f"p{seed}", prompt, 0), transfer_id=transfer_id))
        prefill.run()
        decode.submit(replace(make_request(name, prompt, 4), kv_source=world.source("P", transfer_id)))
    assert decode.step()  # asks for the blocks of both
    world.deliver_all(OpenLease)
    world.deliver()
    world.copies[0].end("the connection broke")
    world.deliver_all(Pulled)
    decode.abort(RequestId("lost"))
    assert decode.step()
    world.deliver_all(Offered)
    world.copy_all()
    assert decode.step()  # what was in flight meanwhile has been computed
    world.deliver_all()
    world.check()
    world.settle()
    world.assert_rest()
    assert decode.transcript.cached("kept") == 20


def _shapes() -> list[GenerateRequest]:
    """Requests of every kind, with prompts that end in, before and after the end of a block of 16."""
    system = numbers(37, 9)
    return [
        *(make_request(f"n{length}", numbers(length, length), 9) for length in (1, 15, 16, 17, 32, 48, 200)),
        make_request("choices", (*system, *numbers(11, 4)), 12, temperature=1.0, num_choices=3),
        make_request("stops", system, 17, min_tokens=3, stop_token_ids=(5, 6, 7, 8, 9)),
        make_request("scores", (*system, *numbers(5, 3)), 12, num_logprobs=0),
        make_request("prompt scores", numbers(64, 5), 16, num_prompt_logprobs=2),
        make_request("nothing", numbers(33, 6), 0),
        make_request("salted", system, 5, cache_salt="tenant"),
    ]


@pytest.mark.parametrize("chunk", [7, 512])
def test_every_kind_of_request_gives_what_it_gives_in_one_pool(chunk: int) -> None:
    alone, _ = make_engine(num_blocks=200, max_prefill_chunk=chunk)
    for request in _shapes():
        alone.add(request)
    expected = run(alone)
    world, prefill, decode = _pair(num_blocks=200, block_size=16, max_step_tokens=512)
    for number, request in enumerate(_shapes()):
        transfer_id = f"{number:032x}"
        computing = make_request(f"p{number}", request.prompt_token_ids, 0, cache_salt=request.cache_salt)
        prefill.submit(replace(computing, transfer_id=transfer_id))
        decode.submit(replace(request, kv_source=world.source("P", transfer_id)))
    world.settle()
    world.assert_rest()
    assert decode.transcript.tokens == expected.tokens
    assert decode.transcript.last == expected.last
    for key, first in expected.first.items():
        there = decode.transcript.first[key]
        assert replace(there, num_cached_tokens=0) == replace(first, num_cached_tokens=0)
    # 17, 32, 48 and 200 tokens, the shared beginning once, and the salted one; "nothing" begins as 200 do.
    stats = decode.engine.stats()
    assert (stats.kv_fetches_total, stats.kv_fetched_tokens_total) == (6, 16 + 16 + 32 + 192 + 32 + 32)
    tails = (1, 15, 16, 1, 16, 16, 8) + 3 * (16,) + (5, 10, 64, 1, 5)
    outputs = sum(len(tokens) - 1 for tokens in expected.tokens.values() if tokens)
    assert decode.memory.num_computed_tokens == sum(tails) + outputs


def test_a_prompt_that_either_side_has_cached_is_not_sent_again() -> None:
    world, prefill, decode = _pair(block_size=16)
    for length in (15, 16, 17, 32, 48):
        for turn in "ab":
            transfer_id = f"{length:016x}{ord(turn):016x}"
            name = f"{turn}{length}"
            prompt = numbers(length, length)
            prefill.submit(replace(make_request(f"p{name}", prompt, 0), transfer_id=transfer_id))
            request = make_request(name, prompt, 3)
            decode.submit(replace(request, kv_source=world.source("P", transfer_id)))
            world.settle()
            assert decode.transcript.tokens[name, 0] == reference(request)
            assert decode.transcript.cached(name) == (length - 1) // 16 * 16
    world.assert_rest()
    stats = decode.engine.stats()
    assert (stats.kv_fetches_total, stats.kv_fetched_tokens_total) == (3, 16 + 16 + 32)
