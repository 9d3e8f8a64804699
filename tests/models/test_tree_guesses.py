"""Trees of guesses of which some way is right: the answers are those of plain decoding, in fewer steps.

The guesses come from somebody who knows the answers, hides them among wrong tokens, and errs now and then.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.models import checkpoints
from tests.models.engine_groups import GREEDY, Client, start_group
from tests.models.served import PROMPTS
from workers.config import SpeculativeConfig
from workers.engine.proposals import HeadTask, Proposals
from workers.engine.step import Executor, StepPlan, StepResult
from workers.runtime.launch import LocalGroup
from workers.types import SamplingParams

GUESSING = SpeculativeConfig(method="medusa", max_draft_tokens=7)
SEEDED = SamplingParams(max_tokens=20, temperature=0.9, top_p=0.95, seed=5, num_logprobs=2)


class Foresight:
    """An executor with heads that know the answers to prompts; `workers.engine.proposals.DraftHeads`."""

    num_heads = 4
    draft_model = None

    def __init__(
        self, executor: Executor, endings: dict[tuple[int, ...], list[int]], num_blocks: int
    ) -> None:
        self._executor = executor
        self._endings = endings
        self._draw = random.Random(4)
        self._plan: StepPlan | None = None
        self.num_blocks = num_blocks
        self.draft_heads = self
        self.num_moved = 0  # tokens that were not where they belong

    def execute(self, plan: StepPlan) -> StepResult:
        self._plan = plan
        result = self._executor.execute(plan)
        self.num_moved += sum(row != place for each in result.slices for place, row in enumerate(each.rows))
        return result

    def close(self) -> None:
        self._executor.close()

    def propose(self, step_number: int, tasks: Sequence[HeadTask]) -> Proposals:
        assert self._plan is not None and self._plan.number == step_number
        trees = [self._tree(task) for task in tasks]
        return Proposals([tokens for tokens, _ in trees], (), [parents for _, parents in trees])

    def _tree(self, task: HeadTask) -> tuple[tuple[int, ...], tuple[int, ...]]:
        assert self._plan is not None
        sample = self._plan.slices[task.slice].sample
        assert sample is not None
        ending = self._endings.get(tuple(sample.prompt_token_ids), [])
        told = [t if self._draw.random() < 0.8 else 3 for t in ending[len(sample.output_token_ids) :]]
        tokens: list[int] = []
        parents: list[int] = []
        last, place = -1, 0
        while len(tokens) < task.num_drafts:
            if self._draw.random() < 0.5 and place < min(len(told), self.num_heads):
                tokens.append(told[place])
                parents.append(last)
                last, place = len(tokens) - 1, place + 1
            else:  # a wrong one, anywhere
                tokens.append(self._draw.choice((100, 101, 102)))
                parents.append(self._draw.randrange(-1, len(parents)))
        return tuple(tokens), tuple(parents)


@pytest.fixture(
    scope="module",
    params=[
        ("llama", 1, "float32"),
        ("llama", 2, "float32"),
        ("mistral", 1, "float32"),
        ("gpt2", 1, "float32"),
        ("mistral", 1, "bfloat16"),
        ("llama", 2, "bfloat16"),
        ("llama", 1, "bfloat16", "int8"),
    ],
    ids=lambda each: "-".join(map(str, each)),
)
def group(request: pytest.FixtureRequest, family_folder: Callable[[str], Path]) -> Iterator[LocalGroup]:
    family, tensor_parallel, dtype, *kv_dtype = request.param
    options = {"dtype": dtype, "kv_dtype": kv_dtype[0] if kv_dtype else "auto"}
    with start_group(family_folder(family), tensor_parallel, **options) as group:
        yield group


def foreseeing(group: LocalGroup, answers: list[list[int]], **options: int) -> tuple[Client, Foresight]:
    endings = {tuple(prompt): answer for prompt, answer in zip(PROMPTS, answers, strict=True)}
    executor = Foresight(group.executor, endings, options.pop("num_blocks", group.executor.num_blocks))
    return Client(group.facts, executor, speculative=GUESSING, clock=lambda: 0.0, **options), executor


@pytest.mark.parametrize(
    "sampling",
    [GREEDY, SEEDED, replace(GREEDY, repetition_penalty=1.3, frequency_penalty=0.5)],
    ids=["greedy", "seeded", "penalties"],
)
@pytest.mark.parametrize("together", [False, True], ids=["alone", "together"])
def test_answers_are_those_of_plain_decoding(
    group: LocalGroup, sampling: SamplingParams, together: bool
) -> None:
    plain = Client(group.facts, group.executor)
    expected = plain.generate(PROMPTS, sampling, together=together)
    client, executor = foreseeing(group, [answer.token_ids for answer in expected])
    answers = client.generate(PROMPTS, sampling, together=together)
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
    for mine, other in zip(answers, expected, strict=True):
        for ours, theirs in zip(mine.logprobs, other.logprobs, strict=True):
            assert (ours.token_id, ours.logprob) == (theirs.token_id, pytest.approx(theirs.logprob, abs=1e-4))
    assert executor.num_moved > 10
    assert client.engine.stats().num_steps < plain.engine.stats().num_steps


def test_ways_that_came_true_are_found_in_the_prefix_cache(group: LocalGroup) -> None:
    """What was moved is what others read: a second request goes on from the first one's answer."""
    long = replace(GREEDY, max_tokens=20)
    plain = Client(group.facts, group.executor, prefix_reuse=False)
    expected = plain.generate(PROMPTS, long)
    client, _ = foreseeing(group, [answer.token_ids for answer in expected])
    client.generate(PROMPTS, long)
    going_on = [[*prompt, *answer.token_ids] for prompt, answer in zip(PROMPTS, expected, strict=True)]
    short = replace(GREEDY, max_tokens=4)
    later = client.generate(going_on, short)
    assert [each.token_ids for each in later] == [e.token_ids for e in plain.generate(going_on, short)]
    assert sum(answer.num_cached for answer in later) >= 16 * len(PROMPTS)


def test_little_memory_changes_nothing(group: LocalGroup) -> None:
    expected = [answer.token_ids for answer in Client(group.facts, group.executor).generate(PROMPTS)]
    client, _ = foreseeing(group, expected, num_blocks=10, expected_output_tokens=1)
    for seed in range(200, 208):
        client.submit(checkpoints.prompt_ids(16, seed=seed), replace(GREEDY, max_tokens=36))
    ids = [client.submit(prompt) for prompt in PROMPTS]
    answers = client.finish()
    assert [answers[request_id, 0].token_ids for request_id in ids] == expected
    assert client.engine.stats().preemptions_total > 0
