"""Steps planned ahead say what steps in turn say: real models, on one rank and on two.

On a CPU a step is computed when it is started, so what is compared here is the way of the ids, from the step
that draws them into the next one, in each form of the decoder.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.models import checkpoints
from tests.models.emulated_device import EmulatedDevice
from tests.models.engine_groups import GREEDY, Answer, Client
from tests.models.served import PROMPTS, Served, serve
from tests.models.test_graphs import BLOCK_SIZE, decode_step, decoder_of, pool_of
from tests.models.test_recordable import Watch
from workers.engine.step import StartedStep, StepPlan
from workers.kernels import NOT_FINITE, Draw, StepMessage, fill_ids, fill_in, has_placeholders, pack_step
from workers.runtime.drawn_ids import DrawnIds
from workers.runtime.executor import GroupExecutor
from workers.runtime.graphs.buckets import Buckets
from workers.runtime.graphs.decoder import GraphedDecoder
from workers.runtime.launch import LocalGroup
from workers.runtime.runner import ModelRunner
from workers.types import FinishReason, RequestId, SamplingParams

RANDOM = SamplingParams(max_tokens=24, temperature=1.0, seed=7)
GROUPS = [("llama", 1), ("mistral", 1), ("gpt2", 1), ("qwen3_moe", 1), ("llama", 2)]


class Counted:
    """A starter that counts its steps, and those with tokens that were not known."""

    def __init__(self, group: LocalGroup) -> None:
        assert isinstance(group.executor, GroupExecutor)
        self._executor = group.executor
        self.num_steps = self.num_ahead = 0

    def start(self, plan: StepPlan) -> StartedStep:
        self.num_steps += 1
        self.num_ahead += any(piece.token_ids[0] < 0 for piece in plan.slices)
        return self._executor.start(plan)


@pytest.fixture(scope="module", params=GROUPS, ids=lambda pair: f"{pair[0]}-tp{pair[1]}")
def served(request: pytest.FixtureRequest, family_folder: Callable[[str], Path]) -> Iterator[Served]:
    name, tensor_parallel = request.param
    with serve(family_folder(name), tensor_parallel) as group:
        yield group


def ids_of(answers: Sequence[Answer]) -> list[list[int]]:
    return [answer.token_ids for answer in answers]


@pytest.mark.parametrize("chunk", [7, None])
def test_alone_from_the_cache_and_together(served: Served, chunk: int | None) -> None:
    counted = Counted(served.group)
    client = served.client(starter=counted, max_prefill_chunk=chunk)
    assert ids_of(client.generate(PROMPTS, together=False)) == served.expected
    again = client.generate(PROMPTS)
    assert ids_of(again) == served.expected
    assert [answer.num_cached for answer in again] == [(len(prompt) - 1) // 16 * 16 for prompt in PROMPTS]
    assert counted.num_ahead > 0.8 * counted.num_steps


def test_preempted(served: Served) -> None:
    counted = Counted(served.group)
    client = served.client(starter=counted, max_prefill_chunk=7, num_blocks=8, expected_output_tokens=1)
    for seed in (200, 201, 202):
        client.submit(checkpoints.prompt_ids(16, seed=seed), replace(GREEDY, max_tokens=36))
    ids = [client.submit(prompt) for prompt in PROMPTS]
    answers = client.finish()
    assert [answers[request_id, 0].token_ids for request_id in ids] == served.expected
    assert client.engine.stats().preemptions_total > 0 and counted.num_ahead > 0


def test_sixteen_ways_of_sampling(served: Served) -> None:
    """Seeds, filters and early ends; then with some that need the host between steps, which come later."""
    kinds = [
        replace(RANDOM, seed=number, temperature=0.6 + 0.1 * (number % 5), **changes)
        for number, changes in enumerate([{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.05}] * 4)
    ]
    kinds[3] = replace(kinds[3], max_tokens=1)
    kinds[5] = replace(kinds[5], stop_token_ids=tuple(range(0, 128, 9)))
    prompts = [checkpoints.prompt_ids(5 + 2 * number, seed=400 + number) for number in range(16)]
    expected = run(served.client(), prompts, kinds)
    counted = Counted(served.group)
    assert run(served.client(starter=counted), prompts, kinds) == expected
    assert counted.num_ahead > 10
    for place, changes in ((12, {"frequency_penalty": 0.4}), (13, {"num_logprobs": 2})):
        kinds[place] = replace(kinds[place], max_tokens=6, **changes)
    assert run(served.client(starter=counted), prompts, kinds) == run(served.client(), prompts, kinds)


def run(client: Client, prompts: Sequence[list[int]], kinds: Sequence[SamplingParams]) -> list[object]:
    ids = [client.submit(prompt, kind) for prompt, kind in zip(prompts, kinds, strict=True)]
    answers = client.finish()
    found = [answers[request_id, 0] for request_id in ids]
    return [(each.token_ids, each.finish, each.logprobs) for each in found]


def test_cancelled_at_random_times(served: Served) -> None:
    draw = random.Random(3)
    client = served.client(starter=Counted(served.group), num_blocks=24, expected_output_tokens=1)
    ids: dict[RequestId, int] = {}
    tokens: dict[RequestId, list[int]] = {}
    for turn in range(60):
        if turn % 4 == 0:
            place = draw.randrange(len(PROMPTS))
            ids[client.submit(PROMPTS[place])] = place
        if turn % 5 == 4:
            client.engine.abort(draw.choice(list(ids)))
        for chunk in client.engine.step():
            tokens.setdefault(chunk.request_id, []).extend(chunk.token_ids)
        client.engine.check_integrity()
    for request_id, answer in client.finish().items():
        tokens.setdefault(request_id[0], []).extend(answer.token_ids)
        assert answer.finish is FinishReason.LENGTH
    assert len(tokens) > 10
    for request_id, found in tokens.items():
        assert found == served.expected[ids[request_id]][: len(found)]


BEST = Draw(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, uniform=0.0)
DRAWN = Draw(temperature=1.0, top_k=9, top_p=0.9, min_p=0.0, uniform=0.3)


def unknown_step(contexts: Sequence[int], rows: Sequence[int]) -> StepMessage:
    """One token of each sequence: that of this row of the step before, or token 5 where it is -1."""
    counts = [-(-(context + 1) // BLOCK_SIZE) for context in contexts]
    return pack_step(
        lens=[1] * len(contexts),
        starts=contexts,
        block_counts=counts,
        token_ids=[5 if row < 0 else -1 - row for row in rows],
        blocks=range(sum(counts)),
        logit_rows=range(len(contexts)),
    )


@pytest.mark.parametrize("is_graphed", [False, True], ids=["by operator", "replayed"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_ids_are_filled_in_where_they_are_drawn(
    name: str, is_graphed: bool, family_folder: Callable[[str], Path]
) -> None:
    decoder = decoder_of(family_folder(name))
    plain_pool = pool_of(decoder)
    pool = plain_pool.clone()
    plain, tested = ModelRunner(decoder, plain_pool), ModelRunner(decoder, pool)
    device = EmulatedDevice()
    if is_graphed:
        graphs = GraphedDecoder(decoder, pool, Buckets(4, 60), device)
        graphs.record()
        tested = ModelRunner(graphs, pool)
    first = decode_step((5, 0, 17), seed=1)
    arriving = tested.start(first, [BEST, DRAWN, BEST])
    wanted = plain.run(first, [BEST, DRAWN, BEST])
    assert wanted is not None
    ids = arriving.wait()
    assert ids == wanted.ids
    second = unknown_step((6, 9, 18, 3), (0, -1, 2, 1))
    assert has_placeholders(second) and not has_placeholders(first)
    known = fill_in(second, ids)
    assert not has_placeholders(known)
    arriving = tested.start(second, [DRAWN] * 4)
    wanted = plain.run(known, [DRAWN] * 4)
    assert wanted is not None and arriving.wait() == wanted.ids
    torch.testing.assert_close(pool.numbers, plain_pool.numbers, atol=1e-5, rtol=0)
    assert sum(graph.num_replays for graph in device.graphs) == (2 if is_graphed else 0)


def test_filling_in_waits_for_nothing() -> None:
    token_ids, drawn = torch.tensor([4, -1, 0, -3, -2]), torch.tensor([7, NOT_FINITE, 9])
    with Watch():
        fill_ids(token_ids, drawn)
    assert token_ids.tolist() == [4, 7, 0, 9, 0] and drawn.tolist() == [7, NOT_FINITE, 9]


def test_a_row_without_numbers_fills_in_a_token_all_the_same(family_folder: Callable[[str], Path]) -> None:
    decoder = decoder_of(family_folder("llama"))
    runner = ModelRunner(decoder, pool_of(decoder))
    runner._drawn.keep(torch.tensor([NOT_FINITE, 4]))
    found = runner.run(unknown_step((6, 3), (0, 1)))
    assert found is not None
    logits = found.logits.clone()
    wanted = runner.run(fill_in(unknown_step((6, 3), (0, 1)), [0, 4]))
    assert wanted is not None and torch.equal(logits, wanted.logits)


def test_a_placeholder_for_no_row_is_refused(family_folder: Callable[[str], Path]) -> None:
    decoder = decoder_of(family_folder("llama"))
    with pytest.raises(ValueError, match="token id outside 0"):
        decoder.forward(unknown_step((6,), (0,)), pool_of(decoder))
    with pytest.raises(ValueError, match="token id outside -512"):
        ModelRunner(decoder, pool_of(decoder)).run(unknown_step((6,), (512,)))


def test_drawn_ids_of_a_host_are_there_at_once() -> None:
    drawn = DrawnIds(torch.device("cpu"))
    arriving = drawn.keep(torch.tensor([7, 8, 9]))
    assert (arriving.arrival, arriving.wait()) == (None, [7, 8, 9])
    drawn.keep(torch.tensor([1]))
    assert drawn.on_device[:4].tolist() == [1, 8, 9, 0] and arriving.wait() == [7, 8, 9]
