"""What users of other servers ran into, at the level of the engine: block multiples, scores, edge values, n.

Logprobs are compared with transformers' to 1e-4, as one forward pass over the whole text gives them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.models import checkpoints
from tests.models.engine_groups import GREEDY, Answer, Client, start_group
from tests.models.oracle import Oracle
from workers.engine.step import StepPlan, StepResult
from workers.runtime.executor import GroupExecutor
from workers.runtime.launch import LocalGroup
from workers.types import FinishReason, RequestId, SamplingParams, TokenLogprob

RANDOM = SamplingParams(max_tokens=24, temperature=1.0, seed=7)


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2"])
def group(request: pytest.FixtureRequest, family_folder: Callable[[str], Path]) -> Iterator[LocalGroup]:
    with start_group(family_folder("llama"), request.param) as started:
        yield started


@pytest.fixture(scope="module")
def oracle(family_folder: Callable[[str], Path]) -> Oracle:
    return Oracle(family_folder("llama"))


def client(group: LocalGroup, **options: int | None) -> Client:
    return Client(group.facts, group.executor, **options)


def check_output_scores(answer: Answer, prompt: Sequence[int], oracle: Oracle) -> None:
    assert [score.token_id for score in answer.logprobs] == answer.token_ids
    expected = oracle.logprobs([*prompt, *answer.token_ids])[len(prompt) - 1 :]
    assert [score.logprob for score in answer.logprobs] == pytest.approx(expected, abs=1e-4)
    for score in answer.logprobs:
        assert len(score.top) == 1 and score.top[0] == (score.token_id, pytest.approx(score.logprob))


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 48, 64])
def test_block_multiples_fully_cached(group: LocalGroup, oracle: Oracle, length: int) -> None:
    """Alone, again, five at once, then the prompt with its own answer as a new prompt."""
    prompt = checkpoints.prompt_ids(length, seed=length)
    sampling = replace(GREEDY, num_logprobs=1)
    mine = client(group)
    (first,) = mine.generate([prompt], sampling)
    check_output_scores(first, prompt, oracle)
    assert first.num_cached == 0
    most = (length - 1) // 16 * 16
    (again,) = mine.generate([prompt], sampling)
    five = mine.generate([prompt] * 5, sampling)
    for answer in (again, *five):
        assert answer.token_ids == first.token_ids
        assert answer.num_cached == most
        check_output_scores(answer, prompt, oracle)
    longer = prompt + first.token_ids
    (continued,) = mine.generate([longer], sampling)
    check_output_scores(continued, longer, oracle)
    assert continued.num_cached == (len(longer) - 1) // 16 * 16
    (fresh,) = client(group).generate([longer], sampling)
    assert continued.token_ids == fresh.token_ids


@pytest.mark.parametrize("chunk", [16, 17, 64, None])
def test_prompt_scores_do_not_depend_on_chunks(group: LocalGroup, oracle: Oracle, chunk: int | None) -> None:
    prompt = checkpoints.prompt_ids(200, seed=1)
    sampling = replace(GREEDY, max_tokens=0, num_prompt_logprobs=3)
    mine = client(group, max_prefill_chunk=chunk)
    mine.generate([prompt], replace(GREEDY, max_tokens=1))  # a cached prefix has no scores to give
    (answer,) = mine.generate([prompt], sampling)
    assert answer.token_ids == [] and answer.finish is FinishReason.LENGTH
    check_prompt_scores(answer, prompt, oracle, num_top=3)


def test_prompt_scores_beside_decoding(group: LocalGroup, oracle: Oracle) -> None:
    mine = client(group, max_prefill_chunk=16)
    prompt, other = checkpoints.prompt_ids(50, seed=2), checkpoints.graded_prompts()[3]
    talking = mine.submit(other)
    for _ in range(3):
        mine.engine.step()  # two for its prompt
    asked = mine.submit(prompt, replace(GREEDY, max_tokens=1, num_prompt_logprobs=2, num_logprobs=2))
    answers = mine.finish()
    check_prompt_scores(answers[asked, 0], prompt, oracle, num_top=2)
    assert answers[talking, 0].token_ids == oracle.greedy(other, 20)[2:]  # 17 tokens took two steps
    expected = oracle.logprobs(prompt + answers[asked, 0].token_ids)[-1]
    assert answers[asked, 0].logprobs[0].logprob == pytest.approx(expected, abs=1e-4)


def check_prompt_scores(answer: Answer, prompt: Sequence[int], oracle: Oracle, *, num_top: int) -> None:
    scores = answer.prompt_logprobs
    assert scores is not None and len(scores) == len(prompt) and scores[0] is None
    exact = oracle.logits(prompt).log_softmax(-1)
    for position, score in enumerate(scores):
        if score is None:
            assert position == 0
            continue
        row = exact[position - 1]
        assert score.token_id == prompt[position]
        assert score.logprob == pytest.approx(float(row[score.token_id]), abs=1e-4)
        values, _ = row.topk(num_top)
        assert [value for _, value in score.top] == pytest.approx(values.tolist(), abs=1e-4)


def test_more_scored_rows_than_one_pass_makes(family_folder: Callable[[str], Path]) -> None:
    """700 rows whose logits are wanted in one step."""
    with start_group(family_folder("llama"), 1) as group:
        prompts = [checkpoints.prompt_ids(100, seed=300 + i) for i in range(7)]
        sampling = replace(GREEDY, max_tokens=1, num_prompt_logprobs=0)
        together = client(group).generate(prompts, sampling)
        alone = client(group).generate(prompts, sampling, together=False)
        for one, other in zip(together, alone, strict=True):
            assert one.token_ids == other.token_ids
            assert _values(one) == pytest.approx(_values(other), abs=1e-5)


def _values(answer: Answer) -> list[float]:
    assert answer.prompt_logprobs is not None
    return [score.logprob for score in answer.prompt_logprobs if score is not None]


@pytest.mark.parametrize(
    "changes",
    [{"top_k": 1}, {"logit_bias": ((5, -100.0), (6, -100.0))}, {"min_tokens": 3, "stop_token_ids": (9,)}],
    ids=str,
)
def test_scores_are_plain_json(group: LocalGroup, changes: dict[str, object]) -> None:
    sampling = replace(RANDOM, max_tokens=4, num_logprobs=5, num_prompt_logprobs=5, **changes)
    (answer,) = client(group).generate([checkpoints.prompt_ids(20)], sampling)
    scores: list[TokenLogprob] = list(answer.logprobs)
    scores += [score for score in answer.prompt_logprobs or () if score is not None]
    assert len(scores) == 4 + 19
    for score in scores:
        values = [score.logprob, *(value for _, value in score.top)]
        assert len(score.top) == 5 and all(math.isfinite(value) and -9999.0 <= value <= 0 for value in values)
        assert [value for _, value in score.top] == sorted(values[1:], reverse=True)
        json.dumps(values, allow_nan=False)


def test_edge_values_of_sampling(group: LocalGroup) -> None:
    mine, prompt = client(group), checkpoints.graded_prompts()[2]

    def ids(**changes: float) -> list[int]:
        (answer,) = mine.generate([prompt], replace(RANDOM, max_tokens=16, seed=1, **changes))
        return answer.token_ids

    greedy = ids(temperature=0.0)
    for temperature in (1e-5, 1e-8, 1e-38, 1e-45, 5e-324):
        assert ids(temperature=temperature) == greedy
    # A temperature at which the margin of these prompts leaves a chance of less than 1e-4.
    assert ids(temperature=1e-3) == greedy
    for edge in ({"top_p": 1e-9}, {"top_k": 1}, {"min_p": 1.0}):
        assert ids(**edge) == greedy
    plain = ids()
    assert plain != greedy
    for top_k in (0, 128, 1_000_000):
        assert ids(top_k=top_k) == plain


def test_choices_of_one_request(group: LocalGroup) -> None:
    prompt = checkpoints.prompt_ids(37, seed=9)

    def choices(
        sampling: SamplingParams, *, prefix_reuse: bool = True, chunk: int | None = None
    ) -> list[list[int]]:
        mine = Client(group.facts, group.executor, prefix_reuse=prefix_reuse, max_prefill_chunk=chunk)
        asked = mine.submit(prompt, sampling, num_choices=4)
        answers = mine.finish()
        assert sorted(answers) == [(asked, choice) for choice in range(4)]
        return [answers[asked, choice].token_ids for choice in range(4)]

    drawn = choices(RANDOM)
    assert len({tuple(ids) for ids in drawn}) == 4
    assert all(len(ids) == 24 for ids in drawn)
    assert choices(RANDOM) == drawn
    assert choices(RANDOM, prefix_reuse=False) == drawn
    assert choices(RANDOM, chunk=7) == drawn
    assert choices(replace(RANDOM, seed=8)) != drawn
    greedy = choices(replace(RANDOM, temperature=0.0))
    assert all(ids == greedy[0] for ids in greedy)


def test_seeded_requests_do_not_see_their_batch(group: LocalGroup) -> None:
    """Sixteen ways of sampling, alone, together, and in another order with chunks and preemption."""
    kinds = [
        replace(RANDOM, seed=number, temperature=0.6 + 0.1 * (number % 5), **changes)
        for number, changes in enumerate(
            [
                {},
                {"top_k": 5},
                {"top_p": 0.8},
                {"min_p": 0.05},
                {"repetition_penalty": 1.2},
                {"presence_penalty": 0.7},
                {"frequency_penalty": 0.4, "top_p": 0.9},
                {"logit_bias": ((3, 4.0), (4, -5.0))},
            ]
            * 2
        )
    ]
    prompts = [checkpoints.prompt_ids(5 + 2 * number, seed=400 + number) for number in range(16)]

    def run(mine: Client, order: Sequence[int]) -> list[list[int]]:
        ids: dict[int, RequestId] = {n: mine.submit(prompts[n], kinds[n]) for n in order}
        answers = mine.finish()
        return [answers[ids[n], 0].token_ids for n in range(16)]

    alone = [client(group).generate([prompts[n]], kinds[n])[0].token_ids for n in range(16)]
    assert run(client(group), range(16)) == alone
    short = client(group, max_prefill_chunk=7, num_blocks=12, expected_output_tokens=1)
    assert run(short, [5, 3, 15, 0, 9, 1, 14, 2, 8, 4, 13, 6, 12, 7, 11, 10]) == alone
    assert short.engine.stats().preemptions_total > 0


def test_continued_by_another_group(group: LocalGroup) -> None:
    """Prompt and the tokens so far as a new prompt: the rest comes as it would have."""
    prompt = checkpoints.prompt_ids(21, seed=12)
    sampling = replace(RANDOM, top_p=0.9)
    (whole,) = client(group).generate([prompt], sampling)
    for cut in (1, 10, 23):
        rest = replace(sampling, max_tokens=24 - cut)
        (answer,) = client(group).generate([prompt + whole.token_ids[:cut]], rest)
        assert answer.token_ids == whole.token_ids[cut:]


class Watched:
    """An executor that remembers the blocks of every prompt it saw."""

    def __init__(self, executor: GroupExecutor) -> None:
        self.inner = executor
        self.num_blocks = executor.num_blocks
        self.blocks: dict[tuple[int, ...], list[int]] = {}
        self.zeroed: list[int] = []

    def execute(self, plan: StepPlan) -> StepResult:
        self.zeroed += plan.zero_blocks
        for piece in plan.slices:
            if piece.sample is not None:
                self.blocks[tuple(piece.sample.prompt_token_ids)] = list(piece.block_table)
        return self.inner.execute(plan)

    def close(self) -> None:
        self.inner.close()


def test_damaged_values_end_one_request_and_leave_no_trace(group: LocalGroup) -> None:
    """Not-a-number in the blocks of one sequence on rank 0: its neighbours are unharmed, and the blocks are
    cleaned before another gets them."""
    prompts = checkpoints.graded_prompts()
    expected = [answer.token_ids for answer in client(group).generate(prompts)]
    assert isinstance(group.executor, GroupExecutor)
    watched = Watched(group.executor)
    mine = Client(group.facts, watched)
    ids = [mine.submit(prompt) for prompt in prompts]
    for _ in range(3):
        mine.engine.step()
    victim = 3
    spoiled = watched.blocks[tuple(prompts[victim])]
    watched.inner.runner.pool.numbers[spoiled[0]] = float("nan")
    answers = mine.finish()
    for number, request_id in enumerate(ids):
        if number != victim:
            assert answers[request_id, 0].token_ids == expected[number][3:]
    again = mine.generate(prompts)
    assert sorted(set(watched.zeroed)) == sorted(spoiled)
    assert [answer.token_ids for answer in again] == expected
    assert not watched.inner.runner.pool.numbers.isnan().any()


def test_damaged_values_are_an_error_of_that_request(group: LocalGroup) -> None:
    assert isinstance(group.executor, GroupExecutor)
    watched = Watched(group.executor)
    mine = Client(group.facts, watched)
    first, second = checkpoints.graded_prompts()[2:4]
    ids = [mine.submit(prompt, replace(GREEDY, num_logprobs=1)) for prompt in (first, second)]
    mine.engine.step()
    watched.inner.runner.pool.numbers[watched.blocks[tuple(first)][0]] = float("nan")
    answers = mine.finish()
    bad, good = answers[ids[0], 0], answers[ids[1], 0]
    assert bad.finish is FinishReason.ERROR and bad.chunk_with_error is not None
    assert bad.chunk_with_error.error_code == "numerical_error"
    assert good.finish is FinishReason.LENGTH and len(good.token_ids) == 19
    mine.generate([first])  # zeroes what was spoiled
    assert not watched.inner.runner.pool.numbers.isnan().any()
